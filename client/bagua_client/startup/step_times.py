"""Times the optimizer steps of any PyTorch job, also where it does not use bagua_client.

``BAGUA_AUTOTUNE_PROBE=FILE:STEPS`` asks for the seconds of STEPS steps after the warm-up. Rank 0
writes FILE twice: at its first step with facts of the job, and at the end with the steps too.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import time
from typing import Any

WARMUP_STEPS = 5
"""First steps, not measured: connections are made in them, buckets cut, kernels chosen."""
WRAPPERS = (
    "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"
)  # fmt: skip


class Recorder:
    """Times the steps of each optimizer, and writes those of the first that has made enough."""

    def __init__(self, path: str, steps: int) -> None:
        self._path = path
        self._steps = steps
        self._marks: dict[int, list[Any]] = {}
        # The hook stays: torch's list of hooks must not change while it goes through it.
        self._is_over = False

    def begin(self) -> None:
        """Follow the steps from now on; torch has been imported."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(self._observe_step)
        atexit.register(self._end)

    def _observe_step(self, optimizer: Any, *_: Any) -> None:
        """An error in timing a training is none of the training's."""
        if self._is_over:
            return
        try:
            self._after_step(optimizer)
        except Exception as error:
            self._is_over = True
            print(f"bagua_client: rank {_rank()} times no steps: {error!r}", file=sys.stderr)

    def _after_step(self, optimizer: Any) -> None:
        if not self._marks:
            if _rank() != 0:
                self._is_over = True
                return
            self._write([])
        marks = self._marks.setdefault(id(optimizer), [])
        marks.append(_mark())
        if len(marks) > WARMUP_STEPS + self._steps:
            self._is_over = True
            self._write(_seconds(marks[WARMUP_STEPS:]))

    def _end(self) -> None:
        """The training ended early: write the steps that there are."""
        if not self._is_over and self._marks:
            longest = max(self._marks.values(), key=len)
            self._write(_seconds(longest[WARMUP_STEPS:]), is_over=True)

    def _write(self, seconds: list[float], is_over: bool = False) -> None:
        import torch.distributed as dist

        is_over = is_over or bool(seconds)
        found = {
            "backend": str(dist.get_backend()) if _has_group() else "",
            "has_client": "bagua_client" in sys.modules,
            "ranks": _ranks(),
            "device": "cuda" if _is_on_gpu() else "cpu",
            "step_seconds": seconds,
            "wrappers": _wrappers() if is_over else [],
            "is_over": is_over,
        }
        with open(f"{self._path}.new", "w") as file:
            json.dump(found, file)
        os.replace(f"{self._path}.new", self._path)


def _wrappers() -> list[str]:
    """Return the classes for training on several ranks that have an object in this process."""
    classes = {name for kind in set(map(type, gc.get_objects())) for name in _names(kind)}
    return [name for name in WRAPPERS if name in classes]


def _names(kind: type) -> list[str]:
    return [each.__name__ for each in kind.__mro__]


def _has_group() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def _rank() -> int:
    import torch.distributed as dist

    if _has_group():
        return dist.get_rank()
    return int(os.environ.get("RANK") or 0)


def _ranks() -> int:
    import torch.distributed as dist

    if _has_group():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE") or 1)


def _is_on_gpu() -> bool:
    import torch

    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _mark() -> Any:
    """A mark of now; on a GPU an event, so that the host does not wait for the device."""
    import torch

    if not _is_on_gpu():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _seconds(marks: list[Any]) -> list[float]:
    """The times from each mark to the next."""
    found = []
    for i, end in enumerate(marks[1:]):
        begin = marks[i]
        if isinstance(begin, float) or isinstance(end, float):
            # The device was first used between two steps: both must be times of the host.
            if isinstance(begin, float) and isinstance(end, float):
                found.append(end - begin)
            continue
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return found

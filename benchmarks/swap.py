"""What it costs to swap the reducer, in time and in memory: parts of reducer.py."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import linear_regression, median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from harness import in_turns, print_table
from models import GradientList, Shape
from recut import hooked
from stepping import (
    LISTS,
    REAL,
    WARM_UP_STEPS,
    Step,
    deviation,
    let_go,
    list_step,
    real_step,
    slowest,
)
from torch.nn.parallel import DistributedDataParallel as Stock

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.torch_private.reducer import rebuild

MIB = 1024 * 1024
SWAP_MS, SWAP_US_PER_TENSOR = 5.0, 20.0
SWAPPED_MIB = (1, 25)
SMALL_LISTS = (10, 100, 1000)
"""Numbers of small tensors, whose swaps show what each tensor costs."""


def swap_seconds(wrapped: DistributedDataParallel, bucket_mib: int, step: Step) -> float:
    """All that a swap takes of this rank: the vote and the new reducer, and at the end of a step
    torch's own cut of it."""
    tunable = wrapped._tunable
    assert tunable is not None
    step(wrapped)  # so that the buckets that go were in use
    dist.barrier()
    began = time.perf_counter()
    assert wrapped.reconfigure(Configuration(bucket_bytes=bucket_mib * MIB))
    _synchronize()
    seconds = time.perf_counter() - began
    let_cut = tunable._let_torch_cut
    cuts: list[float] = []

    def timed() -> None:
        _synchronize()
        dist.barrier()
        began = time.perf_counter()
        let_cut()
        _synchronize()
        cuts.append(time.perf_counter() - began)

    with mock.patch.object(tunable, "_let_torch_cut", timed):
        while not tunable.is_settled:
            step(wrapped)
    return seconds + sum(cuts)


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def measure_swaps(shapes: list[Shape], options: argparse.Namespace) -> list[float]:
    """Seconds of each, on the slowest rank, between the two sizes in turns."""
    device = torch.device(options.device)
    wrapped = DistributedDataParallel(GradientList(shapes).to(device))
    hooked(wrapped)
    step = list_step(device)
    for _ in range(WARM_UP_STEPS):
        step(wrapped)
    to = [partial(swap_seconds, wrapped, size, step) for size in SWAPPED_MIB]
    in_turns(*to, pairs=2)
    times, others = slowest(*in_turns(*to, pairs=max(options.swaps // 2, 1)))
    return times + others


def swaps(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Of the lists of gradients, and of lists of small tensors."""
    lists = {name: shapes() for name, shapes in LISTS.items()}
    lists |= {f"{count} x 4 KiB": [(1024,)] * count for count in SMALL_LISTS}
    found = []
    for name, shapes in lists.items():
        seconds = measure_swaps(shapes, options)
        found.append({"list": name, "tensors": len(shapes), "seconds": seconds})
        let_go()
        if dist.get_rank() == 0:
            print(f"swapped {name}", flush=True)
    return found


def peak_bytes(action: Callable[[], Any]) -> int:
    """The most that ``action`` holds on the GPU beside what was there before."""
    let_go()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    action()
    return torch.cuda.max_memory_allocated() - before


def measure_memory(model: str, bucket_mib: int, is_ours: bool, batch: int) -> dict[str, int]:
    """Peaks of wrapping, of a cut (torch's own after the first step; of ours also a re-cut and
    torch's cut of that) and of a whole step, in bytes."""
    device = torch.device("cuda", torch.cuda.current_device())
    kind, batch_size = REAL[model]
    module = kind().to(device, memory_format=torch.channels_last)
    step = real_step(kind.batch(batch or batch_size, device))
    made: list[Stock] = []
    kind_of_wrapper = DistributedDataParallel if is_ours else Stock
    wrapping = peak_bytes(lambda: made.append(kind_of_wrapper(module, bucket_cap_mb=bucket_mib)))
    (wrapped,) = made
    step(wrapped)
    wrapped.zero_grad(set_to_none=True)
    found = {"wrapping": wrapping, "first cut": peak_bytes(lambda: rebuild(wrapped))}
    if isinstance(wrapped, DistributedDataParallel):
        tunable = hooked(wrapped)
        step(wrapped)
        wrapped.zero_grad(set_to_none=True)
        wider = Configuration(bucket_bytes=2 * bucket_mib * MIB)
        found["re-cut"] = peak_bytes(lambda: wrapped.reconfigure(wider))
        let_cut = tunable._let_torch_cut

        def cut() -> None:
            found["cut after it"] = peak_bytes(let_cut)

        with mock.patch.object(tunable, "_let_torch_cut", cut):
            step(wrapped)
        wrapped.zero_grad(set_to_none=True)
    step(wrapped)
    wrapped.zero_grad(set_to_none=True)
    return {**found, "a step": peak_bytes(lambda: step(wrapped))}


def memory(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Of each model at the first bucket size, torch's and ours."""
    found = []
    for model in options.models:
        peaks = {}
        for name, is_ours in (("torch", False), ("ours", True)):
            peaks[name] = measure_memory(model, options.buckets[0], is_ours, options.batch)
        found.append({"model": model, "bucket_mib": options.buckets[0], **peaks})
    return found


@dataclass(frozen=True)
class Swap:
    """What swaps of one list of gradients took, in milliseconds: median, and the deviation."""

    gradients: str
    tensors: int
    ms: float
    deviation_ms: float

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Swap:
        times = [seconds * 1e3 for seconds in found["seconds"]]
        return cls(found["list"], found["tensors"], median(times), deviation(times))

    @property
    def goal_ms(self) -> float:
        return SWAP_MS + SWAP_US_PER_TENSOR * self.tensors / 1e3


def tensor_cost(found: list[Swap]) -> tuple[float, float]:
    """Milliseconds of a swap, and microseconds more for each tensor, by the lists of small ones."""
    small = [swap for swap in found if swap.gradients not in LISTS]
    line = linear_regression([swap.tensors for swap in small], [swap.ms for swap in small])
    return line.intercept, line.slope * 1e3


def show_swaps(found: list[Swap]) -> None:
    rows = [
        [
            swap.gradients,
            str(swap.tensors),
            f"{swap.ms:.2f} ± {swap.deviation_ms:.2f}",
            f"{swap.ms * 1e3 / swap.tensors:.1f}",
            f"{swap.goal_ms:.2f}",
            "yes" if swap.ms <= swap.goal_ms else "no",
        ]
        for swap in found
    ]
    print_table(["swap of", "tensors", "ms", "us a tensor", "goal ms", "met"], rows)
    whole_ms, tensor_us = tensor_cost(found)
    print(f"a swap takes {whole_ms:.2f} ms and {tensor_us:.1f} us for each tensor (small ones)")


def show_memory(found: list[dict[str, Any]]) -> None:
    rows = []
    for model in found:
        for what, ours in model["ours"].items():
            # Torch's wrapper is never re-cut but by itself after the first step.
            theirs = model["torch"].get(what, model["torch"]["first cut"])
            name = f"{model['model']}, {model['bucket_mib']} MiB"
            rows.append([name, what, f"{theirs / MIB:.1f}", f"{ours / MIB:.1f}"])
    print_table(["model", "peak of", "torch MiB", "ours MiB"], rows)

"""Where the time of a training step goes on a GPU: an account of the kernels that a profile holds.

The profiler sees the kernels of its own process only. Where two processes share a GPU, the other's
computing shows up as longer kernels of this one or as nothing; an NCCL kernel also waits for its
peers, so its time is not that of the network alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.support.harness import print_table

COMPRESSION = {"_bounds", "_quantise", "_quantise_ranges", "_sum"}
"""What ``bagua_client/triton_kernels.py`` launches."""
MARK = "spin_kernel"
"""A part of the name of the kernel of ``torch.cuda._sleep``, with which the profiled steps begin
and end; nothing else launches it."""
CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
"""Of a trace's events, what keeps the GPU busy."""


class Ran(NamedTuple):
    """A kernel or a copy, from ``begin`` to ``end`` in seconds."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Occupancy:
    """Seconds of a step. A moment in which several things run counts once, as the first of these:
    the first five add up to the step.

    Attributes:
        compute_seconds: a kernel runs that is neither of those below. Also torch's own kernels that
            prepare what is compressed.
        compression_seconds: an 8-bit kernel runs.
        copies_seconds: memory is copied or set without a kernel.
        exposed_seconds: only NCCL's kernels run.
        idle_seconds: nothing runs: the GPU waits for its host (or works for another process).
        nccl_seconds: an NCCL kernel runs, hidden or exposed.
    """

    compute_seconds: float
    compression_seconds: float
    copies_seconds: float
    exposed_seconds: float
    idle_seconds: float
    nccl_seconds: float


def occupancy(ran: Iterable[Ran], begin: float, end: float, steps: int = 1) -> Occupancy:
    """The account of a window of that many steps, both of its ends in seconds."""
    parts: dict[str, list[tuple[float, float]]] = {
        name: [] for name in ("compute", "compression", "copies", "nccl")
    }
    for each in ran:
        within = max(each.begin, begin), min(each.end, end)
        if within[0] < within[1]:
            parts[_part(each.name)].append(within)
    seconds: dict[str, float] = {}
    so_far, taken = 0.0, []
    for name, intervals in parts.items():
        taken += intervals
        busy = _covered(taken)
        seconds[name] = (busy - so_far) / steps
        so_far = busy
    return Occupancy(
        compute_seconds=seconds["compute"],
        compression_seconds=seconds["compression"],
        copies_seconds=seconds["copies"],
        exposed_seconds=seconds["nccl"],
        idle_seconds=(end - begin - so_far) / steps,
        nccl_seconds=_covered(parts["nccl"]) / steps,
    )


def _part(name: str) -> str:
    if name.startswith("nccl"):
        return "nccl"
    if name.startswith(("Memcpy", "Memset")):
        return "copies"
    return "compression" if name in COMPRESSION else "compute"


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of their union."""
    length, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        length += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return length


def of_trace(trace: Mapping[str, Any], steps: int) -> Occupancy | None:
    """The account of the steps between the two marks of a Chrome trace as torch's profiler writes
    it; None: the profiler has lost a mark."""
    events = [each for each in trace["traceEvents"] if each.get("cat") in CATEGORIES]
    # Counted from the first: a trace counts from long ago, and sums would lose digits.
    zero = min((each["ts"] for each in events), default=0.0)
    ran = [
        Ran(each["name"], (each["ts"] - zero) / 1e6, (each["ts"] - zero + each["dur"]) / 1e6)
        for each in events
    ]
    marks = sorted(each[1:] for each in ran if MARK in each.name)
    if len(marks) != 2:
        return None
    others = [each for each in ran if MARK not in each.name]
    return occupancy(others, marks[0][1], marks[1][0], steps)


def show(profile: Mapping[str, Mapping[str, float] | None]) -> None:
    """Print the accounts of all arms, in milliseconds of a step."""
    header = ["on rank 0's GPU, ms", "step", "computes", "only 8-bit kernels", "only copies"]
    header += ["only NCCL", "nothing", "NCCL in all"]
    rows: list[Sequence[str]] = []
    for name, seconds in profile.items():
        if seconds is None:
            rows.append([name, *["not known"] * (len(header) - 1)])
            continue
        step = sum(seconds.values()) - seconds["nccl_seconds"]
        rows.append([name, *(f"{1e3 * each:.1f}" for each in (step, *seconds.values()))])
    print_table(header, rows)


def traced(step: Callable[[], None], steps: int, warmup_steps: int, reads: bool) -> dict[str, Any]:
    """The Chrome trace of ``warmup_steps`` and ``steps`` under torch's profiler, on a GPU.

    A mark (see MARK) stands before and after ``steps``; empty unless ``reads``. All ranks must call
    it together.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        # Within the profile: when that begins the GPU has run out of work.
        for _ in range(warmup_steps):
            step()
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
        for _ in range(steps):
            step()
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    if not reads:
        return {}
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        # Names of kernels may be cut within a character.
        trace: dict[str, Any] = json.loads(path.read_text(errors="replace"))
    return trace

"""Steps under torch's profiler, on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def traced(step: Callable[[], None], steps: int, warmup_steps: int, reads: bool) -> dict[str, Any]:
    """The Chrome trace of all steps, with marks (see ``benchmarks/support/cells/occupancy.py``)
    around those after the first ``warmup_steps``; empty unless ``reads``. All ranks must call it
    together."""
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

"""benchmarks/recomputation.py tunes a training, sweeps it by hand, and prints both."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.recomputation import MODELS
from benchmarks.support.jobs.paper_memory import PaperMemory
from benchmarks.support.jobs.recompute import stock_runs_out

pytestmark = pytest.mark.slow
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "recomputation.py"


def test_a_small_model_is_tuned_and_swept(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), "--smoke", "--beside-stock"]
    command += ["--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=590, check=True)
    (file,) = (each for each in tmp_path.glob("*.json") if ".spec" not in each.name)
    found = json.loads(file.read_text())
    counts = [f"{count} of 4" for count in (4, 3, 2, 1, 0)]
    assert list(found["sweep"]) == [*counts, "found", "stock"]
    assert all(row["seconds"] for row in found["sweep"].values())
    assert found["tuning"]["trials"] > 1
    for name in found["sweep"]:
        assert f"\n{name} " in done.stdout


def test_what_runs_out_of_memory_is_run_without_us_too() -> None:
    spec = {**MODELS["tiny"], "sequences": 2, "way": "wrapper", "compiled": "", "ranks": "single"}
    device = torch.device("cpu")
    with PaperMemory(2**40, 1) as memory:
        assert not stock_runs_out(spec, device, [None, 16])
        gc.collect()
        memory.limit_to(2**20)
        assert stock_runs_out(spec, device, [None, 16])

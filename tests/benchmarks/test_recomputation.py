"""benchmarks/recomputation.py tunes a training, sweeps it by hand, and prints both; and the memory
on paper gives blocks as torch's allocator does, and runs out as it would."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.recomputation import MODELS
from benchmarks.support.jobs.paper_memory import MIB, PaperAllocator, PaperMemory
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
    spec |= {"micro_batches": 1}
    device = torch.device("cpu")
    with PaperMemory(2**40, 1) as memory:
        assert not stock_runs_out(spec, device, [None, 16])
        gc.collect()
        memory.limit_to(2**20)
        assert stock_runs_out(spec, device, [None, 16])


def test_blocks_are_split_joined_and_go_back() -> None:
    device = PaperAllocator(60 * MIB)
    blocks = [device.take(3 * MIB) for _ in range(6)]
    assert (device.reserved_bytes, device.allocated_bytes) == (20 * MIB, 18 * MIB)
    small = device.take(1)
    assert (device.reserved_bytes, device.allocated_bytes) == (22 * MIB, 18 * MIB + 512)
    device.give_back(blocks[1])
    device.give_back(blocks[2])
    assert device.take(6 * MIB).size == 6 * MIB  # Where the two were.
    assert (device.reserved_bytes, device.retries) == (22 * MIB, 0)
    large = device.take(31 * MIB)
    assert device.reserved_bytes == 54 * MIB
    device.give_back(large)
    device.take(33 * MIB)  # The segment of 32 MiB goes back for it.
    assert (device.reserved_bytes, device.retries, device.largest_bytes) == (56 * MIB, 1, 34 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        device.take(11 * MIB)
    device.give_back(small)
    device.empty()
    assert device.reserved_bytes == 54 * MIB
    assert device.peak_bytes == 18 * MIB + 34 * MIB + 512  # What is left of 1 MiB is not split off.


def test_a_training_holds_what_its_tensors_take() -> None:
    memory = PaperMemory(2**40, scale=1024)
    with memory:
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
        weights = 4 * 64 * 64 * 4 * 1024
        assert memory.now_bytes() == weights
        loss = model(torch.ones(32, 64)).square().mean()
        kept = memory.now_bytes() - weights
        assert kept > 4 * 32 * 64 * 4 * 1024  # The inputs of all layers, and what the loss needs.
        loss.backward()
        del loss
        assert memory.now_bytes() == 2 * weights
        assert memory.taken().peak_bytes > 2 * weights
        model.zero_grad()
    assert memory.now_bytes() == weights

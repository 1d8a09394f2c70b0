"""The benchmark of DeepSpeed's engines: a small run of each of its parts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import zero
from benchmarks.support.workloads.sharded import SIZES, SIZES_OF_STAGE_3
from tests.client.zero.models import needs_deepspeed

pytestmark = [pytest.mark.slow, needs_deepspeed, pytest.mark.timeout(900)]
DEFAULTS = """
import json
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
print(json.dumps(DeepSpeedZeroConfig(stage=3).model_dump(mode="json", by_alias=True)))
"""


def _found(folder: Path, suffix: str, *options: str) -> tuple[str, dict[str, Any]]:
    """What was printed and written."""
    command = [sys.executable, "benchmarks/zero.py", "--smoke", "--output", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((folder / f"gpt2-tiny-1gbit-{suffix}.json").read_text())


def test_the_default_sizes_are_deepspeeds() -> None:
    done = subprocess.run([sys.executable, "-c", DEFAULTS], capture_output=True, check=True)
    theirs = json.loads(done.stdout.splitlines()[-1])
    for name, size in {**SIZES, **SIZES_OF_STAGE_3}.items():
        assert theirs[name] == size


def test_all_is_measured_in_turns(tmp_path: Path) -> None:
    printed, result = _found(tmp_path, "stage-2", "--system", "6")
    *others, by_hand = result["run_off"]["arms"]
    assert set(others) >= {zero.STOCK, zero.OFF, zero.TUNED, zero.SYSTEM} - {by_hand}
    assert len(result["run_off"]["arms"]) == 5
    swept = {f"{zero.BUCKET} 500,000", f"{zero.BUCKET} 2,000,000"}
    assert swept < set(result["sweep"]["arms"])
    assert result["tuning"]["ended"]
    assert len(result["tuning"]["stored"]["trials"]) > 1
    assert result["system"]["runs"] <= 6
    for words in (zero.STOCK, f"{zero.TUNED}: ", f"{zero.SYSTEM}: "):
        assert words in printed


def test_numbers_are_compared(tmp_path: Path) -> None:
    _, result = _found(tmp_path, "stage-3-equal", "--stage", "3", "--equal", "--equal-steps", "30")
    recut, live = result["trainings"].values()
    for found in (recut, live):
        assert found["losses"] == 60
        assert found["losses_differ"] == found["tensors_differ"] == 0
        assert found["tensors"] > 100
    # Its own and two others; how far the tuning comes in so few steps is its affair.
    assert recut["configurations"] == 3

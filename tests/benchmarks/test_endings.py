"""What lives of torch.distributed leave in a process, as the benchmark counts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "endings.py"


def test_a_tuned_life_leaves_no_more_than_torchs() -> None:
    asked = ["--trainings", "0", "--lives", "2", "--seconds", "1", "--busy", "0"]
    done = subprocess.run(
        [sys.executable, BENCHMARK, *asked], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ours: descriptors and threads after 2 lives" in done.stdout

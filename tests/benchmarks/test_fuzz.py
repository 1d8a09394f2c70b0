"""The fuzzer runs to its end, and says what it found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_a_few_wrong_requests_leave_the_service_as_it_was() -> None:
    command = [sys.executable, "benchmarks/fuzz.py", "--requests", "50"]
    command += ["--slowest-seconds", "60"]  # of a service beside other tests
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "0 answered by 5xx or with a traceback; 0 in the log" in run.stdout
    assert run.stdout.endswith("store: intact\n")

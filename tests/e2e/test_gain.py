"""The gain bench's smoke cell: every part of a cell, small, on a network of its own or loopback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

GAIN = Path(__file__).parents[2] / "benchmarks" / "gain.py"


def start(output: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(GAIN), "--smoke", "--output", str(output)]
    environment = {name: value for name, value in os.environ.items() if "BAGUA" not in name}
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def test_a_smoke_cell_is_tuned_swept_and_run_off(tmp_path: Path) -> None:
    run = start(tmp_path)
    printed, _ = run.communicate(timeout=380)
    assert run.returncode == 0, printed
    cell = json.loads((tmp_path / "smoke-resnet50-1gbit-2x2.json").read_text())
    if cell["fallback"]:
        assert "loopback instead of 1gbit" in printed
    tuning = cell["tuning"]
    assert tuning["tuning_steps"] <= tuning["steps"] == len(tuning["step_seconds"])
    assert tuning["stored"]["trials"][0]["configuration"]["bucket_bytes"] == 25 * 1024**2
    if tuning["ended"]:
        chosen = tuning["stored"]["result"]["configuration"]
        assert {**tuning["configuration"], **chosen} == tuning["configuration"]
    assert cell["arms"]["tuned"]["configuration"] == tuning["configuration"]
    assert set(cell["sweep"]["arms"]) == set(cell["arms"])
    assert {"stock default", "flat 10 MiB", "tuned"} <= set(cell["run_off"]["arms"])
    assert all(
        seconds > 0 for rounds in cell["sweep"]["arms"].values() for b in rounds for seconds in b
    )
    assert (tmp_path / "smoke-resnet50-1gbit-2x2" / "profile.json").exists()
    goals = json.loads((tmp_path / "gain.json").read_text())["goals"]
    assert {goal["number"] for goal in goals} == {1, 2, 3, 4, 5, 6}
    assert "tuned over the sweep's best" in printed


def test_an_interrupted_bench_leaves_no_process(tmp_path: Path) -> None:
    run = start(tmp_path)
    bench = psutil.Process(run.pid)

    def is_rank(process: psutil.Process) -> bool:
        try:
            return any(word.endswith("tune.py") for word in process.cmdline())
        except psutil.NoSuchProcess:
            return False

    def ranks() -> list[psutil.Process]:
        return [process for process in bench.children(recursive=True) if is_rank(process)]

    wait_until(lambda: len(ranks()) >= 4, "the start of the ranks", 100)
    processes = bench.children(recursive=True)
    run.send_signal(signal.SIGINT)
    printed, _ = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "interrupted; --resume goes on" in printed
    wait_until(lambda: not any(process.is_running() for process in processes), "their end", 20)
    assert not list(tmp_path.glob("*.json"))

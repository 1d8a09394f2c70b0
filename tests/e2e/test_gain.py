"""The gain bench's smoke cell: every part of a cell, small, on a network of its own or loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

GAIN = Path(__file__).parents[2] / "benchmarks" / "gain.py"
NAME = "smoke-resnet50-1gbit-2x1"
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the bench's smoke cell with further options; ended with the test, however it goes."""
    runs = []

    def start(*options: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(GAIN), "--smoke", "--output", str(tmp_path), *options]
        environment = {name: value for name, value in os.environ.items() if "BAGUA" not in name}
        # What the user's shell says is for other jobs: it would change this one's baseline.
        environment["BAGUA_DEFAULT_BUCKET_SIZE"] = "65536"
        runs.append(
            subprocess.Popen(
                command,
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
        return runs[-1]

    yield start
    for run in runs:
        if run.poll() is not None:
            continue
        run.terminate()  # so that it can end what it started, in namespaces too
        try:
            run.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            run.kill()
            run.communicate()


def test_a_smoke_cell_is_tuned_swept_and_run_off(start: Start, tmp_path: Path) -> None:
    run = start("--ranks-per-node", "1")
    printed, _ = run.communicate(timeout=380)
    assert run.returncode == 0, printed
    cell = json.loads((tmp_path / f"{NAME}.json").read_text())
    if cell["fallback"]:
        assert "over loopback: " in printed
    else:
        assert 0.5e9 < cell["conditions"]["link"]["bits_per_second"] < 1.1e9

    tuning = cell["tuning"]
    assert tuning["ended"]
    assert tuning["stored"]["state"] == "finished"
    assert tuning["tuning_steps"] < tuning["steps"] == len(tuning["step_seconds"])
    seconds = tuning["step_seconds"][: tuning["tuning_steps"]]
    assert tuning["tuning_seconds"] == pytest.approx(sum(seconds))
    changes = tuning["configurations"]
    assert tuning["first_tuning_step"] == changes[1][0] < tuning["tuning_steps"]
    assert changes[-1][1] == tuning["configuration"]
    assert any("autotune: job" in line for line in tuning["log"])
    assert tuning["stored"]["trials"][0]["configuration"]["bucket_bytes"] == 25 * 1024**2
    chosen = tuning["stored"]["result"]["configuration"]
    assert {**tuning["configuration"], **chosen} == tuning["configuration"]

    assert cell["arms"]["tuned"]["configuration"] == tuning["configuration"]
    assert set(cell["sweep"]["arms"]) == set(cell["arms"])
    assert {"stock default", "flat 10 MiB", "tuned"} <= set(cell["run_off"]["arms"])
    assert all(
        seconds > 0 for rounds in cell["sweep"]["arms"].values() for b in rounds for seconds in b
    )
    assert (tmp_path / NAME / "profile.json").exists()
    goals = json.loads((tmp_path / "gain.json").read_text())["goals"]
    assert {goal["number"] for goal in goals} == {1, 2, 3, 4, 5}
    assert "tuned over the sweep's best" in printed

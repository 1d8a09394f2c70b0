"""The program that measures, started as torchrun does; the others are run by whole cells."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bagua_client import Configuration
from benchmarks.support.cells.cell import SMOKE, TUNED, Cell, ours, sweep_arms
from tests import torchrun

MEASURE = Path(__file__).resolve().parents[3] / "benchmarks" / "support" / "jobs" / "measure.py"
COMPUTE_SECONDS = 0.02
OURS = {"bucket_bytes": 200_000, "channels": 2}

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


def measured(spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    (folder / "spec.json").write_text(json.dumps(spec))
    command = [*torchrun.COMMAND, str(MEASURE), str(folder / "spec.json"), str(folder / "out.json")]
    # Nothing is tuned, whatever the environment says.
    variables = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "BAGUA_AUTOTUNE": "1"}
    subprocess.run(command, env=variables, check=True)
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


def test_every_arm_is_measured_in_every_round(tmp_path: Path) -> None:
    arms = [
        {"name": "default", "kind": "stock", "bucket_mib": None},
        {"name": "flat", "kind": "ours", "configuration": {"bucket_bytes": 100_000}},
        {"name": "channels", "kind": "ours", "configuration": OURS},
        {"name": "compute", "kind": "compute"},
    ]
    spec = {
        "workload": "resnet50",
        "gradient_bytes": 1_000_000,
        "compute_seconds": COMPUTE_SECONDS,
        "seed": 1,
        "arms": arms,
        "rounds": 2,
        "steps": 3,
        "warmup_steps": 1,
    }
    result = measured(spec, tmp_path)
    assert list(result["arms"]) == [arm["name"] for arm in arms]
    for rounds in result["arms"].values():
        assert [len(steps) for steps in rounds] == [3, 3]
        assert min(seconds for steps in rounds for seconds in steps) >= 0.99 * COMPUTE_SECONDS
    assert result["gradient_bytes"] == pytest.approx(1_000_000, rel=0.01)
    assert result["tensors"] == 161


def test_what_results_rest_on_is_measured_again_in_the_same_job(tmp_path: Path) -> None:
    cell = Cell("resnet50", "1gbit", nodes=2, ranks_per_node=1, gradient_bytes=1_000_000)
    arms = [*sweep_arms(cell, SMOKE), ours(TUNED, Configuration(2**20, channels=2).to_json())]
    spec = {
        **cell.workload,
        "compute_seconds": COMPUTE_SECONDS,
        "arms": arms,
        "rounds": 1,
        "steps": 1,
        "warmup_steps": 1,
        "run_off": {
            "rounds": 2,
            "steps": 2,
            "cell": cell.to_json(),
            "effort": SMOKE.to_json(),
        },
    }
    result = measured(spec, tmp_path)
    assert set(result["sweep"]["arms"]) == {arm["name"] for arm in arms}
    assert {"stock default", "compute", TUNED} <= set(result["run_off"]["arms"])
    assert all(len(rounds) == 2 for rounds in result["run_off"]["arms"].values())

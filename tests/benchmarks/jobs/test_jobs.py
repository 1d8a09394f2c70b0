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

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


def test_what_results_rest_on_is_measured_again_in_the_same_job(tmp_path: Path) -> None:
    cell = Cell("resnet50", "1gbit", nodes=2, ranks_per_node=1, gradient_bytes=1_000_000)
    arms = [*sweep_arms(cell, SMOKE), ours(TUNED, Configuration(2**20, channels=2).to_json())]
    spec = {
        **cell.workload,
        "compute_seconds": COMPUTE_SECONDS,
        "arms": arms,
        "rounds": 1,
        "steps": 2,
        "warmup_steps": 1,
        "run_off": {
            "rounds": 2,
            "steps": 2,
            "cell": cell.to_json(),
            "effort": SMOKE.to_json(),
        },
    }
    given, out = tmp_path / "spec.json", tmp_path / "out.json"
    given.write_text(json.dumps(spec))
    # Nothing is tuned, whatever the environment says.
    variables = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "BAGUA_AUTOTUNE": "1"}
    subprocess.run([*torchrun.COMMAND, MEASURE, given, out], env=variables, check=True)
    result: dict[str, Any] = json.loads(out.read_text())
    assert set(result["sweep"]["arms"]) == {arm["name"] for arm in arms}
    for rounds in result["sweep"]["arms"].values():
        assert min(rounds[0]) >= 0.99 * COMPUTE_SECONDS
    assert result["sweep"]["gradient_bytes"] == pytest.approx(1_000_000, rel=0.01)
    assert result["sweep"]["tensors"] == 161
    assert {"stock default", "compute", TUNED} <= set(result["run_off"]["arms"])
    assert all(len(rounds) == 2 for rounds in result["run_off"]["arms"].values())

"""The rank programs, started by torchrun on loopback."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bagua_client import Configuration
from examples.launch import start, wait

JOBS = Path(__file__).resolve().parents[3] / "benchmarks" / "jobs"
COMPUTE_SECONDS = 0.02

pytestmark = pytest.mark.e2e


def _run(
    program: str, spec: Mapping[str, Any], folder: Path, variables: Mapping[str, str] | None = None
) -> dict[str, Any]:
    (folder / "spec.json").write_text(json.dumps(spec))
    script = [str(JOBS / program), str(folder / "spec.json"), str(folder / "out.json")]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", **(variables or {})}
    assert wait(start(script, nodes=1, ranks_per_node=2, environment=environment)) == 0
    return json.loads((folder / "out.json").read_text())


def test_every_arm_is_measured_in_every_round(tmp_path: Path) -> None:
    arms = [
        {"name": "default", "kind": "stock", "bucket_mib": None},
        {"name": "stock 1 MiB", "kind": "stock", "bucket_mib": 1},
        {"name": "flat", "kind": "ours", "configuration": {"bucket_bytes": 100_000}},
        {
            "name": "channels",
            "kind": "ours",
            "configuration": {"bucket_bytes": 200_000, "channels": 2},
        },
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
    # Nothing is tuned, whatever the environment says.
    result = _run("measure.py", spec, tmp_path, {"BAGUA_AUTOTUNE": "1"})
    assert list(result["arms"]) == [arm["name"] for arm in arms]
    for rounds in result["arms"].values():
        assert [len(steps) for steps in rounds] == [3, 3]
        assert min(seconds for steps in rounds for seconds in steps) >= 0.99 * COMPUTE_SECONDS
    assert result["gradient_bytes"] == pytest.approx(1_000_000, rel=0.01)
    assert result["tensors"] == 161


def test_a_job_is_tuned_until_its_tuning_ends(tmp_path: Path) -> None:
    spec = {
        "workload": "vgg16",
        "gradient_bytes": 1_000_000,
        "compute_seconds": COMPUTE_SECONDS,
        "seed": 0,
        "most_steps": 3000,
        "after_steps": 4,
    }
    result = _run("tune.py", spec, tmp_path, {"BAGUA_AUTOTUNE": "1"})
    assert result["ended"]
    assert len(result["step_seconds"]) == result["steps"] == result["tuning_steps"] + 4
    tuning = result["step_seconds"][: result["tuning_steps"]]
    assert result["tuning_seconds"] == pytest.approx(sum(tuning))
    changes = result["configurations"]
    assert result["first_tuning_step"] == changes[1][0] < result["tuning_steps"]
    assert changes[-1][1] == result["configuration"]
    assert Configuration.from_json(result["configuration"])
    assert any("autotune: job" in line for line in result["log"])


def test_the_digits_are_measured_too(tmp_path: Path) -> None:
    arms = [{"name": "default", "kind": "stock", "bucket_mib": None}]
    arms.append({"name": "ours", "kind": "ours", "configuration": {}})
    spec = {"workload": "digits", "arms": arms, "rounds": 1, "steps": 1, "warmup_steps": 0}
    result = _run("measure.py", spec, tmp_path)
    assert result["gradient_bytes"] == pytest.approx(44.7e6, rel=0.01)
    assert [len(rounds) for rounds in result["arms"].values()] == [1, 1]

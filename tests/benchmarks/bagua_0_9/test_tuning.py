"""Bagua's own service, in its own environment, tunes a job of two ranks from end to end."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import requests
from bagua_0_9.environment import prepare, release_path
from bagua_0_9.service import bagua_service
from bagua_0_9.worker import MODEL_NAME
from testbed import Host

from bagua_client import Configuration

# The first time, Bagua's environment is made.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

JOB = Path(__file__).resolve().parents[3] / "benchmarks" / "jobs" / "bagua.py"
SAMPLES = 3
WORKLOAD = {"workload": "vgg16", "gradient_bytes": 2_000_000, "compute_seconds": 0.01}


@pytest.fixture(scope="module")
def _bagua():
    try:
        release_path()
        prepare()
    except RuntimeError as error:
        pytest.skip(str(error))


def run(script: Path, specification: dict, folder: Path) -> dict:
    """What rank 0 of two wrote."""
    reads, writes = folder / "spec.json", folder / "out.json"
    reads.write_text(json.dumps(specification))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", str(script), str(reads), str(writes)]
    subprocess.run(command, check=True, timeout=300)
    return json.loads(writes.read_text())


@pytest.mark.usefixtures("_bagua")
def test_the_service_s_choice_is_in_force_at_the_end(tmp_path):
    host = Host("here", "127.0.0.1", "lo")
    limits = {"max_samples": SAMPLES, "confidence_seconds": 0.5, "warmup_seconds": 0}
    with bagua_service(host, 2, tmp_path, **limits) as address:
        result = run(
            JOB,
            {**WORKLOAD, "service": address, "most_steps": 2000, "after_steps": 2},
            tmp_path,
        )
        question = {"model_name": MODEL_NAME, "rank": 0, "train_iter": 0}
        asked = requests.post(f"http://{address}/api/v1/ask_hyperparameters", json=question)
    (table,) = tmp_path.glob("bagua_autotune_*.log")
    samples = list(csv.DictReader(table.open()))

    # Bagua asks for one more than it calls samples: the default comes before them.
    assert result["ended"]
    assert result["samples"] == len(samples) == SAMPLES + 1
    steps = [report["step"] for report in result["reports"]]
    assert steps == list(range(10, result["tuning_steps"] + 1, 10))
    assert len(result["step_seconds"]) == result["steps"] > result["tuning_steps"]

    # A configuration that can be measured again: what the service now tells everybody who asks.
    final = Configuration.from_json(result["configuration"])
    told = asked.json()["recommended_hyperparameters"]
    assert sum(final.buckets) == result["tensors"]
    assert list(final.buckets) == [len(bucket) for bucket in told["buckets"]]
    assert final.hierarchical == ("leaders" if told["is_hierarchical_reduce"] else "off")


@pytest.mark.usefixtures("_bagua")
def test_a_service_that_cannot_start_says_why(tmp_path):
    nowhere = Host("nowhere", "192.0.2.1", "lo")
    with (
        pytest.raises(RuntimeError, match=r"(?s)ended with exit code 1: .*assign req"),
        bagua_service(nowhere, 2, tmp_path),
    ):
        pass

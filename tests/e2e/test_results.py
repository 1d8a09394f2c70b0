"""A job is tuned, its result goes where people look, and another training runs with it alone."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua_client
from bagua_client import Configuration, DistributedDataParallel, Tuning
from bagua_client.integrations.distributed_data_parallel import tunable_of
from bagua_client.torch_private import reducer as torchs
from tests.e2e.programs.training import batch, make_model
from tests.e2e.service import ServiceProcess
from tests.ranks import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

SHORT = {
    "BAGUA_AUTOTUNE": "1",
    "BAGUA_AUTOTUNE_MAX_SAMPLES": "3",
    "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S": "0.2",
    "BAGUA_AUTOTUNE_WARMUP_TIME_S": "0.2",
    "BAGUA_AUTOTUNE_KNOBS": "bucket_bytes=48KiB,channels=1/2",
}


@dataclass(frozen=True)
class _Run:
    """What became of a training on one rank.

    Attributes:
        difference: the largest between a gradient and that of stock DDP, in any step.
        digest: of the layout in the end.
        buckets: tensors by bucket.
        told: by the callback.
    """

    configuration: Configuration
    difference: float
    digest: int
    buckets: list[int]
    told: list[Tuning]


def _run(most_steps: int) -> _Run:
    """Train until the tuning has ended, if there is one, and six steps more."""
    told: list[Tuning] = []
    bagua_client.on_tuned(told.append)
    plain = make_model()
    twin = nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    difference = 0.0
    is_tuned = model.is_tuning
    while most_steps > 0:
        most_steps -= 1
        inputs, targets = batch(most_steps, dist.get_rank())
        for each in (model, twin):
            each.zero_grad()
            nn.functional.mse_loss(each(inputs), targets).backward()
        optimizer.step()
        for ours, theirs in zip(plain.parameters(), twin.module.parameters(), strict=True):
            assert ours.grad is not None and theirs.grad is not None  # noqa: PT018
            difference = max(difference, float((ours.grad - theirs.grad).abs().max()))
        if is_tuned and not model.is_tuning:
            is_tuned, most_steps = False, min(most_steps, 6)
    layout = tunable_of(model).layout
    buckets = [len(bucket) for bucket in layout.partition]
    return _Run(model.configuration, difference, layout.digest, buckets, told)


@contextmanager
def _ranks(**variables: str) -> Iterator[RankPool]:
    pool = RankPool((2,), collective_timeout_seconds=40, variables=variables)
    try:
        yield pool
    finally:
        pool.close()


def _export(job: str, *options: str) -> str:
    command = [sys.executable, "-m", "bagua_autotune", "export", job, *options]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(
    not torchs.HAS_BUCKET_CAPS, reason="torch before 2.11 cannot set the size of each bucket"
)
def test_tuned_exported_and_trained_with_the_file_alone(
    service: ServiceProcess, tmp_path: Path
) -> None:
    service.start()
    lines, path = tmp_path / "results.jsonl", tmp_path / "tuned.json"
    more = {"BAGUA_AUTOTUNE_RESULT": str(lines), "BAGUA_AUTOTUNE_URL": service.url}
    with _ranks(**SHORT, **more) as pool:
        first, *others = pool.run(_run, 3000, timeout_seconds=200)
    result = service.job()["result"]
    for rank, run in enumerate((first, *others)):
        (tuning,) = run.told
        assert tuning.rank == rank
        assert run.difference < 1e-6
        assert (run.configuration, run.digest) == (first.configuration, first.digest)
        assert tuning.best == run.configuration == Configuration.from_json(result["configuration"])
    # What the service has, whoever tells it.
    (line,) = map(json.loads, lines.read_text().splitlines())
    told: dict[str, Any] = first.told[0].to_json()
    numbers = (name for name, value in result.items() if isinstance(value, (int, float)))
    for name in ("summary", *numbers):
        assert line[name] == told[name] == result[name], name
    assert line["best"] == told["best"]
    assert line["page"] == f"{service.url}/jobs/{service.job()['id']}"

    path.write_text(_export(service.job()["id"], "--configuration", "--url", service.url))
    service.kill()  # no service any more
    with _ranks(BAGUA_CONFIGURATION=str(path)) as pool:
        for run in pool.run(_run, 10):
            assert (run.configuration, run.digest) == (first.configuration, first.digest)
            assert run.difference < 1e-6
            assert run.told == []
        document = json.loads(path.read_text())
        count = document["tensors"]["count"]
        document["configuration"].update(buckets=[1, count - 1], channels=4)
        path.write_text(json.dumps(document))
        for run in pool.run(_run, 10):
            assert run.buckets == [1, count - 1]
            assert run.configuration.channels == 4
            assert run.difference < 1e-6

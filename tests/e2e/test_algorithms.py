"""The tuner chooses among algorithms, in a job one of whose ranks is slow."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bagua_client import DistributedDataParallel
from bagua_client.algorithms import AsyncModelAverageAlgorithm
from tests.e2e.programs.training import batch, make_model
from tests.e2e.service import ServiceProcess
from tests.ranks import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

LISTED = {"bytegrad", "powersgd", "decentralized", "async"}
FAST_SECONDS, SLOW_SECONDS = 0.004, 0.08
MOST_SECONDS = 150.0


@dataclass(frozen=True)
class End:
    """Of one rank's training.

    Attributes:
        steps: that it made under the kept configuration, until all had made some.
        apart: by how much the replicas differ at most, after they were averaged.
    """

    algorithm: str
    steps: int
    loss: float
    apart: float


def _train() -> End:
    os.environ["BAGUA_AUTOTUNE_ALLOW"] = ",".join(LISTED)
    try:
        model = DistributedDataParallel(make_model())
    finally:
        del os.environ["BAGUA_AUTOTUNE_ALLOW"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    rank = dist.get_rank()

    def step(number: int) -> float:
        inputs, targets = batch(number, rank)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        model.report_loss(loss)
        loss.backward()
        optimizer.step()
        time.sleep(SLOW_SECONDS if rank == 1 else FAST_SECONDS)
        return loss.item()

    number, until = 0, time.monotonic() + MOST_SECONDS
    while model.is_tuning and time.monotonic() < until:
        step(number)
        number += 1
    tuned, until = number, time.monotonic() + 2.0
    while time.monotonic() < until if model.algorithm.is_apart else number < tuned + 20:
        loss = step(number)
        number += 1
    if isinstance(model.algorithm, AsyncModelAverageAlgorithm):
        model.algorithm.abort(model, average=True)
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    low, high = weights.clone(), weights.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    return End(model.algorithm.name, number - tuned, loss, float((high - low).max()))


def test_a_job_with_a_slow_rank_goes_on_without_waiting_for_it(
    service: ServiceProcess, tuned_ranks: Callable[..., RankPool]
) -> None:
    service.start()
    ends = tuned_ranks(service.url).run(_train, timeout_seconds=250)
    job, trials = service.job(), service.trials()
    assert job["state"] == "finished"
    assert {trial["state"] for trial in trials} == {"measured"}
    by_name: dict[str, list[float]] = {}
    for trial in trials:
        by_name.setdefault(trial["configuration"]["algorithm"], []).append(trial["seconds"])
    assert set(by_name) == {"gradient_allreduce", *LISTED}
    # All others wait for the slow rank in each step.
    others = [seconds for name in by_name if name != "async" for seconds in by_name[name]]
    assert max(by_name["async"]) < SLOW_SECONDS <= min(others), by_name
    assert job["result"]["configuration"]["algorithm"] == "async"
    assert "algorithm async (changes the numbers)" in job["result"]["summary"]
    assert {end.algorithm for end in ends} == {"async"}
    slow = ends.pop(1)
    assert all(end.steps > slow.steps for end in ends)
    assert all(end.loss < 2.0 and end.apart < 1e-6 for end in [*ends, slow])

"""Each observer of a training fails on one rank, in a real tuning: all ranks stop the tuning in the
same step, in a line, and the training ends with the bits that it would have had without us."""

from __future__ import annotations

import gc
import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock

from bagua_client import DistributedDataParallel
from bagua_client.agent import job
from bagua_client.agent.outcome import Outcome
from bagua_client.agent.report import Pace
from bagua_client.algorithms import Algorithm, QAdamAlgorithm, QAdamOptimizer
from bagua_client.guard import LossGuard
from bagua_client.measuring.clock import CpuClock, StepTimer
from bagua_client.measuring.profiler import Profiler, Recording
from bagua_client.measuring.rank_measurement import BatchComplexity, RankMeasurement, StepBoundary
from bagua_client.reducer.observation import BucketObservation, ReadyOrder
from bagua_client.reporter.inbox import Inbox
from bagua_client.reporter.reporter import Reporter
from bagua_client.torch_private import reducer as torchs
from bagua_client.tunable.tunable import Timeline
from tests.client.agent.scripted_service import ScriptedService, tuned_at
from tests.client.listening import fails_on_purpose, logged
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

ON_ALL_RANKS = [
    (BucketObservation, "bucket_starts"),
    (ReadyOrder, "saw"),
    (ReadyOrder, "_digest"),
    (CpuClock, "mark"),
    (StepTimer, "tick"),
    (StepTimer, "computed"),
    (StepTimer, "waiting"),
    (StepTimer, "stepped"),
    (StepTimer, "unmeasured"),
    (StepTimer, "drain"),
    (StepBoundary, "_after_step"),
    (StepBoundary, "begins"),
    (BatchComplexity, "tell"),
    (BatchComplexity, "take"),
    (RankMeasurement, "tick"),
    (RankMeasurement, "record"),
    (RankMeasurement, "begin"),
    (RankMeasurement, "take"),
    (LossGuard, "tell"),
    (LossGuard, "take"),
    (LossGuard, "judge"),
    (LossGuard, "begin"),
    (Outcome, "_tell"),
]
ON_RANK_0 = [
    (Pace, "until_next"),
    (Pace, "took"),
    (Profiler, "begin_trial"),
    (Profiler, "reduction_done"),
    (Profiler, "take"),
    (Timeline, "tensor_ready"),
    (Timeline, "bucket_starts"),
    (Timeline, "_bucket_ends"),
    (torchs, "bytes_of"),
    (Recording, "read"),
    (Reporter, "look"),
    (Reporter, "take_command"),
    (Inbox, "put"),
    (job, "describe_job"),
]
MOST_STEPS = 1000
TRIAL = {"bucket_bytes": 25 * 2**20}
"""All in one bucket, as without tuning: some algorithms compute with a bucket as a whole."""
ALGORITHMS = ["gradient_allreduce", "bytegrad", "qadam", "decentralized"]
"""Torch's own way; gradients, an optimizer's moments and weights that travel by ours."""


class _Training:
    """Of a small model; deterministic."""

    def __init__(self, algorithm: str, is_stock: bool = False) -> None:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(7, 13), nn.BatchNorm1d(13), nn.Linear(13, 5))
        self._optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        chosen: Algorithm | str = algorithm
        if algorithm == "qadam":
            adam = QAdamOptimizer(model.parameters(), lr=1e-3, warmup_steps=3)
            self._optimizer, chosen = adam, QAdamAlgorithm(adam)
        if is_stock and algorithm == "gradient_allreduce":
            self.model: Any = Stock(model)
        else:
            self.model = DistributedDataParallel(model, algorithm=chosen)
        self.steps = 0

    def step(self) -> torch.Tensor:
        """The weights after it."""
        model, self.steps = self.model, self.steps + 1
        generator = torch.Generator().manual_seed(100 * self.steps + dist.get_rank())
        is_ours = isinstance(model, DistributedDataParallel)
        if is_ours:
            model.report_complexity(1.0)
        self._optimizer.zero_grad()
        loss = model(torch.randn(6, 7, generator=generator)).square().mean()
        loss.backward()
        self._optimizer.step()
        if is_ours:
            model.report_loss(loss)
        with model.unmeasured() if is_ours and self.steps % 4 == 0 else nullcontext():
            return torch.cat([value.detach().reshape(-1) for value in model.state_dict().values()])


def _train(algorithm: str, url: str, owner: Any, name: str, rank: int, usual: Any) -> str:
    """What is wrong; empty: nothing."""
    place = f"{owner.__name__.rpartition('.')[2]}.{name}"
    gc.collect()  # What is left of other models observes each optimizer's steps, too, and fails.
    told_to_all = logged(logging.WARNING)
    environment = tuned_at(url, JOB=f"{algorithm} {place} {rank}")
    with (
        told_to_all as lines,
        fails_on_purpose(owner, name, dist.get_rank() == rank, RuntimeError) as hits,
        environment,
    ):
        training, weights, left = _Training(algorithm), [], 3
        while left and training.steps < MOST_STEPS:
            left -= not training.model.is_tuning
            weights.append(training.step())
    tuning, told = training.model.tuning, [each for each in lines if "on purpose" in each]
    for step, found in enumerate(weights):  # Only now: the twin is observed, too.
        if not torch.equal(found, usual(step)):
            return f"{place}: other weights after step {step}"
    if left:
        return f"{place}: the tuning goes on"
    is_called = name != "waiting" or not training.model.algorithm.leaves_gradients
    if dist.get_rank() == rank and (bool(hits) != is_called or len(told) != is_called):
        return f"{place}: {len(hits)} failures, {lines}"
    expected = "failed" if is_called else "finished"
    return "" if tuning.state == expected else f"{place}: {tuning}"


def _all_fail(algorithm: str, url: str) -> list[str]:
    """What is wrong, if anything."""
    twin = _Training(algorithm, is_stock=True)
    weights: list[torch.Tensor] = []

    def usual(step: int) -> torch.Tensor:
        while len(weights) <= step:
            weights.append(twin.step())
        return weights[step]

    # On either rank: rank 0 leads the tuning.
    first = ALGORITHMS.index(algorithm)
    places = [(*each, (first + at) % 2) for at, each in enumerate(ON_ALL_RANKS)]
    places += [(*each, 0) for each in ON_RANK_0]
    # All of them by torch's way, and some by each of the others.
    places = places[first::9] if first else places
    return [wrong for each in places if (wrong := _train(algorithm, url, *each, usual))]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_observer_that_fails_ends_the_tuning_and_changes_no_bit(
    two_ranks: RankPool, algorithm: str
) -> None:
    with ScriptedService([[TRIAL]], steps=6) as service:
        assert two_ranks.run(_all_fail, algorithm, service.url) == [[], []]

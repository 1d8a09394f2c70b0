"""Trainings whose ranks are apart, and each algorithm beside a rank that stands still."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest
import torch
import torch.distributed as dist

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.algorithms import Algorithm, QAdamAlgorithm, QAdamOptimizer
from tests.client.algorithms.small import loss_of, small_model
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

NAMES = [
    "gradient_allreduce",
    "bytegrad",
    "powersgd",
    "qadam",
    "decentralized",
    "low_precision_decentralized",
    "async",
]
ARGUMENTS = {"async": {"sync_interval_ms": 1}, "powersgd": {"start_powerSGD_iter": 4}}
STOPPED_SECONDS = 1


def _begin(name: str) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    model = small_model()
    if name == "qadam":
        adam = QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=4)
        return DistributedDataParallel(model, algorithm=QAdamAlgorithm(adam)), adam
    algorithm = Algorithm.init(name, **ARGUMENTS.get(name, {}))
    wrapped = DistributedDataParallel(model, algorithm=algorithm)
    return wrapped, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _trained_in_eval_mode() -> torch.Tensor:
    """The weights of a training whose rank 1 makes passes of its own, which the others wait for."""
    model, optimizer = _begin("async")
    model.eval()
    for step in range(8):
        if step == 0:
            assert model.reconfigure(Configuration(200))
        for is_after in (False, True):
            if dist.get_rank() == 1:
                loss_of(model, 1, 99)
            dist.barrier()
            if not is_after:
                optimizer.zero_grad()
                loss_of(model, dist.get_rank(), step).backward()
                optimizer.step()
    assert model.configuration == Configuration(200)
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_async_keeps_replicas_near_in_eval_mode_beside_passes_of_one_rank(
    two_ranks: RankPool,
) -> None:
    first, second = two_ranks.run(_trained_in_eval_mode)
    apart = float((first - second).abs().max())
    assert 0 < apart < 1, "both trained, and the weights met"


def _stand_still(names: list[str]) -> dict[str, float]:
    """The last loss of each; in the middle rank 1 is stopped for a while."""
    found = {}
    for name in names:
        model, optimizer = _begin(name)
        for step in range(12):
            if step == 6 and dist.get_rank() == 1:
                own = os.getpid()
                subprocess.Popen(["sh", "-c", f"sleep {STOPPED_SECONDS}; kill -CONT {own}"])
                os.kill(own, signal.SIGSTOP)
            optimizer.zero_grad()
            loss = loss_of(model, dist.get_rank(), step)
            loss.backward()
            optimizer.step()
        if name == "async":
            model.algorithm.abort(model)  # type: ignore[attr-defined]
        found[name] = loss.item()
    return found


def test_a_rank_that_stands_still_is_waited_for(two_ranks: RankPool) -> None:
    for found in two_ranks.run(_stand_still, NAMES, timeout_seconds=120):
        assert list(found) == NAMES
        assert max(found.values()) < 1.0

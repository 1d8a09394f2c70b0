"""Each algorithm in a training as people write it, and beside a rank that stands still."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock
from torch.nn.utils import clip_grad_norm_

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.algorithms import Algorithm, QAdamAlgorithm, QAdamOptimizer
from bagua_client.integrations.distributed_data_parallel import tunable_of
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
STEPS = 24
RECUTS = {6: Configuration(200), 12: Configuration(100, "shards", channels=2), 18: Configuration()}
STOPPED_SECONDS = 5


def _begin(name: str) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    model = small_model()
    if name == "qadam":
        adam = QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=4)
        return DistributedDataParallel(model, algorithm=QAdamAlgorithm(adam)), adam
    algorithm = Algorithm.init(name, **ARGUMENTS.get(name, {}))
    wrapped = DistributedDataParallel(model, algorithm=algorithm)
    return wrapped, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[torch.Tensor, list[float]]:
    """Accumulated over two passes, in mixed precision, scaled, clipped, evaluated now and then.
    The weights in the end, and the losses of the evaluation."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
    rank, losses = dist.get_rank(), []
    for step in range(STEPS):
        if step in RECUTS and isinstance(model, DistributedDataParallel):
            assert model.reconfigure(RECUTS[step])
        model.train()
        optimizer.zero_grad()
        for part in range(2):
            waits = model.no_sync() if part == 0 else nullcontext()  # type: ignore[operator]
            with waits, torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, rank, 2 * step + part) / 2
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        if step % 5 == 0:
            model.eval()
            with torch.no_grad():
                losses.append(loss_of(model, 0, 0).item())
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return weights, losses


def _with_all(name: str) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
    """Ours; the same with stock DDP; the losses of ours."""
    weights, losses = _train(*_begin(name))
    plain = small_model()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    if name == "qadam":  # One whose warm-up never ends is Adam.
        optimizer = QAdamOptimizer(plain.parameters(), lr=0.01, warmup_steps=10**6)
    stock, _ = _train(Stock(plain), optimizer)
    return weights, stock, losses


@pytest.mark.parametrize("name", ["gradient_allreduce", "bytegrad", "powersgd", "qadam"])
def test_gradient_algorithms_work_with_all_that_trainings_do(
    four_ranks: RankPool, name: str
) -> None:
    ends = four_ranks.run(_with_all, name)
    for weights, stock, losses in ends:
        assert torch.equal(weights, ends[0][0]), "all ranks have the same bits"
        moved = (
            stock - torch.cat([p.detach().reshape(-1) for p in small_model().parameters()])
        ).norm()
        off = float((weights - stock).norm() / moved)
        # Momenta are clipped, where the twin clips gradients.
        most = {"gradient_allreduce": 1e-2, "bytegrad": 0.05, "powersgd": 0.5, "qadam": 0.7}
        assert off < most[name], off
        assert losses[-1] < 0.8 * losses[0]


def _in_mode(name: str, trains: bool, looks: bool) -> tuple[torch.Tensor, Configuration]:
    """The weights in the end, and what is in force, of a training that begins with a
    re-cut.

    Args:
        trains: whether the model is in training mode.
        looks: whether one rank makes passes of its own, which the others wait for.
    """
    model, optimizer = _begin(name)
    model.train(trains)
    rank = dist.get_rank()
    for step in range(8):
        if step == 0:
            assert model.reconfigure(Configuration(200))
        for is_after in (False, True):
            if looks and rank == 1:
                loss_of(model, rank, 99)
            if looks:
                dist.barrier()
            if not is_after:
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()
    found = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return found, tunable_of(model).layout.configuration


@pytest.mark.parametrize("name", [name for name in NAMES if name != "async"])
def test_the_mode_of_the_model_and_passes_of_one_rank_change_nothing(
    two_ranks: RankPool, name: str
) -> None:
    usual = two_ranks.run(_in_mode, name, True, False)
    for trains, looks in ((False, False), (True, True), (False, True)):
        found = two_ranks.run(_in_mode, name, trains, looks)
        for (weights, configuration), (expected, _) in zip(found, usual, strict=True):
            assert torch.equal(weights, expected)
            assert configuration == Configuration(200)


def test_async_keeps_replicas_near_in_eval_mode_beside_passes_of_one_rank(
    two_ranks: RankPool,
) -> None:
    (first, _), (second, _) = two_ranks.run(_in_mode, "async", False, True)
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

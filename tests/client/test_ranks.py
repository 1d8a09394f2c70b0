"""The ranks that the tests train on are like those of a real job; and the others end where one is
killed."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.algorithms import Algorithm
from tests.ranks import RankPool

WORDS = [f"layer{index}.weight" for index in range(20)]


def _words_of_a_set() -> tuple[str, ...]:
    return tuple(set(WORDS))


def test_spawned_ranks_iterate_over_a_set_of_strings_in_different_orders(
    three_ranks: RankPool,
) -> None:
    """Or no test would notice a collective order that comes from one."""
    assert len(set(three_ranks.run(_words_of_a_set))) == 3


def _set_variable() -> None:
    os.environ["BAGUA_AUTOTUNE_URL"] = "1"


def test_a_variable_that_a_test_sets_is_gone_for_the_next(two_ranks: RankPool) -> None:
    two_ranks.run(_set_variable)
    assert two_ranks.run(os.getenv, "BAGUA_AUTOTUNE_URL") == [None, None]


COLLECTIVE_TIMEOUT_SECONDS = 20


def _train_until_killed(configuration: Configuration, victim: int) -> None:
    ours = DistributedDataParallel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))))
    assert ours.reconfigure(configuration)
    steps = 0

    def die(_: torch.Tensor) -> None:
        if steps == 3 and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    ours.module[2].weight.register_post_accumulate_grad_hook(die)
    for _ in range(10):
        steps += 1
        ours.zero_grad()
        ours(torch.ones(2, 64)).sum().backward()


@pytest.mark.parametrize(
    ("configuration", "victim"),
    [
        (Configuration(1, channels=2), 3),
        (Configuration(1, "leaders", channels=2), 1),
        (Configuration(1, "shards", channels=4), 2),
    ],
    ids=str,
)
def test_the_other_ranks_end_with_torchs_own_error(
    configuration: Configuration, victim: int
) -> None:
    pool = RankPool([2, 2], collective_timeout_seconds=COLLECTIVE_TIMEOUT_SECONDS)
    try:
        outcomes = pool.outcomes(_train_until_killed, configuration, victim, timeout_seconds=90)
    finally:
        pool.close()
    assert outcomes.pop(victim).error == "ended with exit code -9"
    for rank, outcome in outcomes.items():
        assert outcome.error is not None, f"rank {rank} did not notice"
        assert "backward" in outcome.error, outcome.error
        # What a hook raises is followed by where it was, in torch's own form.
        lines = outcome.error.splitlines()
        assert any(line.startswith(("RuntimeError", "torch.distributed")) for line in lines), lines
        assert "gloo" in outcome.error, "the error is torch.distributed's own"


def _train_with(name: str, victim: int) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    arguments = {"async": {"sync_interval_ms": 1}, "powersgd": {"start_powerSGD_iter": 2}}
    algorithm = Algorithm.init(name, **arguments.get(name, {}))
    ours = DistributedDataParallel(model, algorithm=algorithm)
    for step in range(1000):
        optimizer.zero_grad()
        ours(torch.ones(2, 64)).sum().backward()
        if step == 5 and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()


@pytest.mark.parametrize("name", ["bytegrad", "powersgd", "decentralized", "async"])
def test_the_other_ranks_end_under_each_algorithm(name: str) -> None:
    """A rank on a ring or in a round hears of it by its neighbours or by the next round."""
    pool = RankPool([2, 1], collective_timeout_seconds=COLLECTIVE_TIMEOUT_SECONDS)
    try:
        outcomes = pool.outcomes(_train_with, name, 1, timeout_seconds=90)
    finally:
        pool.close()
    assert outcomes.pop(1).error == "ended with exit code -9"
    for rank, outcome in outcomes.items():
        assert outcome.error is not None, f"rank {rank} did not notice"
        assert "RuntimeError" in outcome.error, outcome.error

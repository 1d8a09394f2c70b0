"""Each rank's own computing time, told by real ranks: long on a slow rank, and on no other."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bagua_client import DistributedDataParallel
from tests.client.agent.scripted_service import ScriptedService
from tests.ranks import RankPool

SLOW_SECONDS = 0.02
STEPS = 12


class _Model(torch.nn.Module):
    """One of its ranks computes longer; a layer may be unused, and it may have buffers."""

    def __init__(self, slow_rank: int, uses_all: bool = True, has_buffers: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))
        self.is_slow = dist.get_rank() == slow_rank
        self._used = len(self.layers) if uses_all else len(self.layers) - 1
        if has_buffers:
            self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_slow:
            time.sleep(SLOW_SECONDS)
        for layer in self.layers[: self._used]:
            x = layer(x)
        return x.sum()


def _train(
    url: str,
    slow_rank: int = -1,
    slow_to_load: int = -1,
    uses_all: bool = True,
    passes: int = 1,
    accumulates: bool = False,
) -> None:
    """Train until the tuning has ended.

    Args:
        slow_rank: computes longer in each forward pass.
        slow_to_load: waits for its data before; the model then has buffers to be broadcast.
        passes: backward passes for each step of the optimizer.
        accumulates: only the last of them communicates.
    """
    os.environ.update(BAGUA_AUTOTUNE="1", BAGUA_AUTOTUNE_URL=url)
    plain = _Model(slow_rank, uses_all, has_buffers=slow_to_load >= 0)
    model = DistributedDataParallel(plain, find_unused_parameters=not uses_all)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2000):
        if dist.get_rank() == slow_to_load:
            time.sleep(SLOW_SECONDS)
        for number in range(passes):
            is_last = number == passes - 1
            with model.no_sync() if accumulates and not is_last else nullcontext():
                model(torch.ones(2, 16)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if not model.is_tuning:
            break
    del os.environ["BAGUA_AUTOTUNE"]
    assert not model.is_tuning


def _steps(ranks: RankPool, **arguments: Any) -> list[dict[str, Any]]:
    """The steps that the service was told of."""
    with ScriptedService([[{"bucket_bytes": 2000}]], steps=STEPS) as service:
        ranks.run(partial(_train, service.url, **arguments))
        return [step for batch in service.bodies("observations") for step in batch["steps"]]


def _medians(steps: list[dict[str, Any]], times: str) -> list[float]:
    """Of the two ranks."""
    first, second = zip(*(step[times] for step in steps), strict=True)
    return [median(first), median(second)]


@pytest.mark.parametrize("uses_all", [True, False])
def test_the_rank_that_is_slow_computes_longer_while_all_steps_are_alike(
    two_ranks: RankPool, uses_all: bool
) -> None:
    steps = _steps(two_ranks, slow_rank=1, uses_all=uses_all)
    fast, slow = _medians(steps, "compute_seconds")
    assert slow >= SLOW_SECONDS
    assert slow - fast > SLOW_SECONDS / 2
    one, other = _medians(steps, "seconds")
    assert abs(one - other) < SLOW_SECONDS / 2
    for step in steps:
        for compute, whole in zip(step["compute_seconds"], step["seconds"], strict=True):
            assert 0 < compute <= whole


def test_waiting_for_the_buffers_of_a_rank_that_is_slow_to_load_is_not_computing(
    two_ranks: RankPool,
) -> None:
    slow, fast = _medians(_steps(two_ranks, slow_to_load=0), "compute_seconds")
    assert slow - fast > SLOW_SECONDS / 2


@pytest.mark.parametrize("accumulates", [True, False])
def test_the_passes_of_a_step_compute_together(two_ranks: RankPool, accumulates: bool) -> None:
    """Whether each of them communicates or the last one alone."""
    steps = _steps(two_ranks, slow_rank=1, passes=3, accumulates=accumulates)
    fast, slow = _medians(steps, "compute_seconds")
    assert slow - fast > 2 * SLOW_SECONDS

"""A training that goes on from a checkpoint makes the steps of the one that was never stopped."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bagua_client import DistributedDataParallel
from bagua_client.algorithms import (
    Algorithm,
    AsyncModelAverageAlgorithm,
    ByteGradAlgorithm,
    DecentralizedAlgorithm,
    GradientAllReduceAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
    PowerSGDAlgorithm,
    QAdamAlgorithm,
    QAdamOptimizer,
)
from tests.client.algorithms.small import loss_of
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

STEPS, RECUT_AT = 7, 4
GOES_ON_AT = (1, 2, 4, 5)
"""Buckets are not final before the second step; warm-ups end before the third."""
SMALL_BYTES = 300

MAKERS: dict[str, Callable[[], Algorithm]] = {
    "gradient_allreduce": lambda: GradientAllReduceAlgorithm(hierarchical=True),
    "bytegrad": ByteGradAlgorithm,
    "bytegrad, a range": lambda: ByteGradAlgorithm(error_feedback=True, range_elements=None),
    "powersgd": lambda: PowerSGDAlgorithm(start_powerSGD_iter=2, hierarchical=True),
    "powersgd, cold": lambda: PowerSGDAlgorithm(2, 0, warm_start=False),
    "decentralized": DecentralizedAlgorithm,
    "shift_one": lambda: DecentralizedAlgorithm(False, "shift_one", 2),
    "low_precision": LowPrecisionDecentralizedAlgorithm,
    "async": lambda: AsyncModelAverageAlgorithm(warmup_steps=100),
}
ON_FOUR = ["gradient_allreduce", "bytegrad, a range", "powersgd", "low_precision", "shift_one"]
"""Four ranks are on two nodes, and sums of more than two numbers depend on their order."""
ON_TWO = ["bytegrad", "powersgd", "powersgd, cold", "decentralized", "async"]
ON_TWO += ["qadam", "qadam, compatible"]


class _OutOfOrder(nn.Module):
    """Its gradients become ready in another order than it lists its parameters in."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.last = nn.Linear(13, 5)
        self.first = nn.Linear(7, 13)
        self.norm = nn.LayerNorm(13)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.norm(self.first(inputs)).tanh())
        return found


class _Training:
    def __init__(self, name: str, **options: Any) -> None:
        model = _OutOfOrder()
        if name.startswith("qadam"):
            self.optimizer: torch.optim.Optimizer = QAdamOptimizer(
                model.parameters(), 0.01, warmup_steps=2, compatible="compatible" in name
            )
            algorithm: Algorithm = QAdamAlgorithm(self.optimizer)  # type: ignore[arg-type]
        else:
            self.optimizer = torch.optim.AdamW(model.parameters(), 0.01)
            algorithm = MAKERS[name]()
        self.model = DistributedDataParallel(model, algorithm=algorithm, **options)

    def step(self, number: int) -> torch.Tensor:
        """The weights after it. Gradients are accumulated over two passes."""
        self.optimizer.zero_grad()
        for part in range(2):
            with self.model.no_sync() if part == 0 else nullcontext():
                loss_of(self.model, dist.get_rank(), 2 * number + part).backward()
        self.optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])

    def recut(self) -> None:
        now = self.model.configuration
        assert self.model.reconfigure(replace(now, bucket_bytes=SMALL_BYTES, first_bucket_bytes=0))

    def save(self) -> bytes:
        file = io.BytesIO()
        states = (each.state_dict() for each in (self.model, self.optimizer, self.model.algorithm))
        torch.save(tuple(states), file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        weights, moments, own = torch.load(io.BytesIO(saved), weights_only=True)
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(moments)
        self.model.algorithm.load_state_dict(own)


def _resumed(names: list[str], options: dict[str, Any]) -> list[str]:
    """The algorithms and steps after which a training that went on was another."""
    differ = []
    for name in names:
        straight = _Training(name, **options)
        saved, weights = [], []
        for step in range(STEPS):
            if step == RECUT_AT:
                straight.recut()
            saved.append(straight.save())
            weights.append(straight.step(step))
        for begin in GOES_ON_AT:
            resumed = _Training(name, **options)
            resumed.load(saved[begin])
            for step in (begin, begin + 1):
                if step == RECUT_AT != begin:
                    resumed.recut()
                if not torch.equal(resumed.step(step), weights[step]):
                    differ.append(f"{name}: step {step} after going on at step {begin}")
                    break
    return differ


def test_it_goes_on_bit_for_bit(two_ranks: RankPool) -> None:
    assert two_ranks.run(_resumed, ON_TWO, {}) == [[]] * 2


def test_it_goes_on_bit_for_bit_on_two_nodes(four_ranks: RankPool) -> None:
    assert four_ranks.run(_resumed, ON_FOUR, {}) == [[]] * 4


def test_so_do_trainings_that_torch_cuts_in_its_own_order(two_ranks: RankPool) -> None:
    names = ["bytegrad, a range", "powersgd", "low_precision", "qadam"]
    assert two_ranks.run(_resumed, names, {"find_unused_parameters": True}) == [[]] * 2


def _loaded_otherwise(rank_without: int | None, options: dict[str, Any]) -> tuple[list[str], int]:
    """The names of the first bucket in the first step of a training that goes on, and the bytes of
    a bucket afterwards."""
    straight = _Training("bytegrad")
    for step in range(3):
        straight.step(step)
    straight.recut()
    straight.step(3)
    resumed = _Training("bytegrad", **options)
    if dist.get_rank() != rank_without:
        resumed.load(straight.save())
    seen: list[str] = []
    algorithm = resumed.model.algorithm
    departs = algorithm.departs

    def look(bucket: Any, wire: torch.Tensor) -> None:
        if not seen:
            seen.extend(algorithm.names[id(parameter)] for parameter in bucket.parameters())
        departs(bucket, wire)

    algorithm.departs = look  # type: ignore[method-assign]
    resumed.step(4)
    return seen, resumed.model.configuration.bucket_bytes


LISTED = ["last.weight", "last.bias", "first.weight", "first.bias", "norm.weight", "norm.bias"]


@pytest.mark.parametrize(("rank_without", "is_taken"), [(None, True), (1, False), (0, False)])
def test_the_buckets_are_taken_up_if_all_ranks_have_loaded_them(
    two_ranks: RankPool, rank_without: int | None, is_taken: bool
) -> None:
    for first, size_bytes in two_ranks.run(_loaded_otherwise, rank_without, {}):
        assert (first != LISTED) is is_taken
        assert (size_bytes == SMALL_BYTES) is is_taken


def test_a_script_that_asks_for_other_buckets_gets_them_in_the_known_order(
    two_ranks: RankPool,
) -> None:
    for first, size_bytes in two_ranks.run(_loaded_otherwise, None, {"bucket_cap_mb": 1}):
        assert first[0] in ("last.bias", "last.weight")
        assert first != LISTED
        assert size_bytes == 2**20


def _of_another_model() -> bool:
    """Whether it trains, with the buckets of a new training."""
    resumed = _Training("bytegrad")
    state = resumed.model.algorithm.state_dict()
    state["layout"]["order"] = ["another.weight"]
    resumed.model.algorithm.load_state_dict(state)
    return bool(torch.equal(resumed.step(0), _Training("bytegrad").step(0)))


def test_the_buckets_of_another_model_are_left(two_ranks: RankPool) -> None:
    assert two_ranks.run(_of_another_model) == [True, True]

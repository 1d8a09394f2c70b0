"""An algorithm that was written for Bagua is tuned, and what cannot be one is refused. (That
Bagua's own train as ours is in test_release_algorithms.py.)"""

from __future__ import annotations

import os
from itertools import groupby
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua_compat.torch_api as bagua
from bagua_client import Configuration
from bagua_client.algorithms import GlobalAlgorithmRegistry
from bagua_compat.torch_api.algorithms import Algorithm, AlgorithmImpl
from bagua_compat.torch_api.algorithms.decentralized import (
    DecentralizedAlgorithm,
)
from bagua_compat.torch_api.bucket import BaguaBucket
from tests.client.agent.scripted_service import ScriptedService
from tests.client.algorithms.small import loss_of, small_model
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

MOST_STEPS = 4000


class Averages(Algorithm):
    def reify(self, process_group: Any) -> AlgorithmImpl:
        return AveragesImpl(process_group)


class AveragesImpl(AlgorithmImpl):
    def init_operations(self, bagua_ddp: Any, bucket: BaguaBucket) -> None:
        bucket.append_centralized_synchronous_op(group=self.process_group)


def _tuned(url: str) -> list[int]:
    """How many buckets there were, in turn."""
    variables = {"BAGUA_AUTOTUNE": "1", "BAGUA_AUTOTUNE_URL": url}
    if not bagua.communication.is_initialized():
        bagua.init_process_group()
    model: Any = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mock.patch.dict(os.environ, variables):
        model.with_bagua([optimizer], Averages())
    counts = []
    for step in range(MOST_STEPS):
        if not model.bagua_ddp.wrapper.is_tuning:
            break
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
        counts.append(len(model.bagua_buckets))
    return [count for count, _ in groupby(counts)]


def test_a_tuning_recuts_it(two_ranks: RankPool) -> None:
    tried = [Configuration(size).to_json() for size in (100, 400, 100)]
    with ScriptedService([tried]) as service:
        counts = two_ranks.run(_tuned, service.url)
        assert service.bodies("disagreement") == []
        (registration,) = service.bodies("PUT")
    assert registration["default_configuration"]["algorithm"] == "AveragesImpl"
    assert counts == [[1, 2, 1, 2]] * 2


class Backwards(nn.Module):
    """Its layers become ready in the order in which they are declared."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.first = nn.Linear(40, 40, bias=False), nn.Linear(40, 40, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(x))
        return found


def _in_ready_order() -> tuple[list[list[str]], float]:
    """The names in each bucket, before the first step and after it; how far gradients are off the
    mean."""
    if not bagua.communication.is_initialized():
        bagua.init_process_group()
    torch.manual_seed(0)
    model: Any = Backwards()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.with_bagua([optimizer], Averages())
    assert model.bagua_ddp.wrapper.reconfigure(Configuration(100))
    wrong, names = 0.0, []
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.full((1, 40), float(dist.get_rank()))).sum().backward()
        mean = model.first.weight.grad.clone()
        dist.all_reduce(mean)
        wrong = max(wrong, float((mean / 2 - model.first.weight.grad).abs().max()))
        names.append([t.bagua_tensor_name for b in model.bagua_buckets for t in b.tensors])
    return [names[0], names[-1]], wrong


def test_buckets_follow_the_order_in_which_gradients_become_ready(two_ranks: RankPool) -> None:
    backwards = ["first.weight", "second.weight"]
    for names, wrong in two_ranks.run(_in_ready_order):
        assert names == [backwards, backwards[::-1]]
        assert wrong < 1e-6


class Unknown(AlgorithmImpl):
    def init_tensors(self, bagua_ddp: Any) -> list[Any]:
        tensor: Any = torch.zeros(3)
        return [tensor.ensure_bagua_tensor("of nobody", bagua_ddp.bagua_module_name)]


class UnknownAlgorithm(Algorithm):
    def reify(self, process_group: Any) -> AlgorithmImpl:
        return Unknown(process_group)


def _refused() -> tuple[str, str]:
    if not bagua.communication.is_initialized():
        bagua.init_process_group()
    found, model = [], cast(Any, small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for algorithm in (UnknownAlgorithm(), "bytegrad?"):
        try:
            model.with_bagua([optimizer], algorithm)
        except (TypeError, ValueError) as error:
            found.append(str(error))
    return found[0], found[1]


def test_what_cannot_be_cut_into_buckets_is_refused(two_ranks: RankPool) -> None:
    for tensors, algorithm in two_ranks.run(_refused):
        assert "'of nobody'" in tensors
        assert "must be an instance of Algorithm" in algorithm


def test_algorithms_are_found_by_bagua_s_names() -> None:
    registry = bagua.algorithms.GlobalAlgorithmRegistry
    registry.register("user's", Averages, description="of this test")
    assert isinstance(Algorithm.init("user's"), Averages)
    assert "user's" in registry
    assert "user's" not in GlobalAlgorithmRegistry.available_algorithms()
    # Bagua's, which averages over a single node, and not ours, which pairs the ranks there.
    assert type(Algorithm.init("decentralized")) is DecentralizedAlgorithm
    # Bagua has all but torch's, and none for sharded models.
    ours = set(GlobalAlgorithmRegistry.available_algorithms("replicated"))
    assert ours - {"powersgd"} < set(registry)
    assert "powersgd" not in registry

"""The seam for algorithms: toy ones, registered from outside, decide how gradients travel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bagua_client import Algorithm, Configuration, DistributedDataParallel
from bagua_client.algorithms import GlobalAlgorithmRegistry, register
from bagua_client.communication.communicator import Communicator
from bagua_client.communication.operations import Operation
from tests.client.comparison import difference, pair
from tests.ranks import RankPool

pytestmark = pytest.mark.slow


class Coarse:
    """Rounds what travels to whole numbers: an operation without communication."""

    def start(self, flat: torch.Tensor) -> None:
        flat.round_()


class CoarseAllReduce(Algorithm):
    """Gradients rounded before and after the all-reduce."""

    def scale(self, world_size: int) -> float:
        return 1.0

    def operations(
        self, communicator: Communicator, configuration: Configuration, channel: int
    ) -> Sequence[Operation]:
        return [Coarse(), *communicator.sum_operations(configuration, channel), Coarse()]


@contextmanager
def _registered() -> Iterator[None]:
    known = GlobalAlgorithmRegistry._declarations
    with mock.patch.object(GlobalAlgorithmRegistry, "_declarations", dict(known)):
        register("coarse")(CoarseAllReduce)
        yield


def _inputs(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(5, 6, generator=generator)


def _coarse_gradients(hierarchical: str) -> float:
    model = nn.Linear(6, 2)
    with _registered():
        ours = DistributedDataParallel(model, algorithm="coarse")
    assert ours.reconfigure(Configuration(20, hierarchical))
    worst = 0.0
    for step in range(4):
        ours.zero_grad()
        (10 * ours(_inputs(dist.get_rank(), step))).square().mean().backward()
        expected = torch.zeros(2, 6)
        for rank in range(dist.get_world_size()):
            loss = (10 * model(_inputs(rank, step))).square().mean()
            (gradient,) = torch.autograd.grad(loss, [model.weight])
            expected += gradient.round()
        worst = max(worst, float((model.weight.grad - expected).abs().max()))
    return worst


@pytest.mark.parametrize("hierarchical", ["off", "shards"])
def test_operations_added_around_the_all_reduce(four_ranks: RankPool, hierarchical: str) -> None:
    assert four_ranks.run(_coarse_gradients, hierarchical) == [0.0] * 4


def _instance() -> str | None:
    class Doubled(Algorithm):
        def scale(self, world_size: int) -> float:
            return 2.0 / world_size

        def operations(
            self, communicator: Communicator, configuration: Configuration, channel: int
        ) -> Sequence[Operation]:
            return communicator.sum_operations(configuration, channel)

    stock, _ = pair(nn.Linear(6, 2))
    twin = nn.Linear(6, 2)
    twin.load_state_dict(stock.module.state_dict())
    ours = DistributedDataParallel(twin, algorithm=Doubled())
    inputs = _inputs(dist.get_rank(), 0)
    (2 * stock(inputs).mean()).backward()
    ours(inputs).mean().backward()
    return difference(stock, ours)


def test_an_instance_is_taken_as_it_is(two_ranks: RankPool) -> None:
    assert two_ranks.run(_instance) == [None, None]

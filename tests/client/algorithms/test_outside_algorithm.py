"""The seam for algorithms: toy ones, registered from outside, decide what travels and when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bagua_client import Algorithm, Communicates, Configuration, DistributedDataParallel, When
from bagua_client.algorithms import base, register
from bagua_client.buckets.bucket import Bucket
from bagua_client.communication.communicator import Communicator
from bagua_client.communication.operations import Operation
from tests.client.comparison import difference, pair
from tests.ranks import RankPool


class WeightAverage(Algorithm):
    """Local steps, then the weights are averaged."""

    communicates = Communicates.WEIGHT
    when = When.OPTIMIZER_STEPPED

    def operations(
        self, bucket: Bucket, communicator: Communicator, configuration: Configuration
    ) -> Sequence[Operation]:
        return communicator.sum_operations(configuration, bucket.channel)


class Coarse:
    """Rounds what travels to whole numbers: an operation without communication."""

    def start(self, flat: torch.Tensor) -> None:
        flat.round_()


class CoarseAllReduce(Algorithm):
    """Gradients rounded before and after the all-reduce."""

    def scale(self, world_size: int) -> float:
        return 1.0

    def operations(
        self, bucket: Bucket, communicator: Communicator, configuration: Configuration
    ) -> Sequence[Operation]:
        return [Coarse(), *communicator.sum_operations(configuration, bucket.channel), Coarse()]


@contextmanager
def _registered() -> Iterator[None]:
    before = dict(base._algorithms)
    register("weight_average")(WeightAverage)
    register("coarse")(CoarseAllReduce)
    yield
    base._algorithms.clear()
    base._algorithms.update(before)


def _inputs(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(5, 6, generator=generator)


def _average_weights(hierarchical: str) -> float:
    model = nn.Linear(6, 2)
    alone = [nn.Linear(6, 2) for _ in range(dist.get_world_size())]
    for other in alone:
        other.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with _registered():
        ours = DistributedDataParallel(model, optimizers=optimizer, algorithm="weight_average")
    assert ours.reconfigure(Configuration(20, hierarchical))
    for step in range(4):
        optimizer.zero_grad()
        ours(_inputs(dist.get_rank(), step)).square().mean().backward()
        optimizer.step()
        # The same by hand: every rank's local step, then the mean.
        for rank, other in enumerate(alone):
            other.zero_grad()
            other(_inputs(rank, step)).square().mean().backward()
            torch.optim.SGD(other.parameters(), lr=0.1).step()
        weight = torch.stack([other.weight.detach() for other in alone]).mean(dim=0)
        bias = torch.stack([other.bias.detach() for other in alone]).mean(dim=0)
        for other in alone:
            other.load_state_dict({"weight": weight, "bias": bias})
    return float((ours.module.weight - weight).abs().max())


@pytest.mark.parametrize("hierarchical", ["off", "shards"])
def test_weights_averaged_after_the_optimizers_step(
    four_ranks: RankPool, hierarchical: str
) -> None:
    assert max(four_ranks.run(_average_weights, hierarchical)) < 1e-5


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


@pytest.mark.parametrize("hierarchical", ["off", "leaders", "shards"])
def test_operations_added_around_the_all_reduce(four_ranks: RankPool, hierarchical: str) -> None:
    assert four_ranks.run(_coarse_gradients, hierarchical) == [0.0] * 4


def _missing_optimizer() -> str:
    with _registered(), pytest.raises(ValueError) as caught:
        DistributedDataParallel(nn.Linear(2, 2), algorithm="weight_average")
    return str(caught.value)


def test_an_algorithm_of_the_optimizers_step_asks_for_the_optimizers(two_ranks: RankPool) -> None:
    assert "2 parameters are in no optimizer" in two_ranks.run(_missing_optimizer)[0]


def _instance() -> str | None:
    class Doubled(Algorithm):
        def scale(self, world_size: int) -> float:
            return 2.0 / world_size

        def operations(
            self, bucket: Bucket, communicator: Communicator, configuration: Configuration
        ) -> Sequence[Operation]:
            return communicator.sum_operations(configuration, bucket.channel)

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

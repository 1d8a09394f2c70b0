"""Gradients in eight bits: bit for bit what Bagua computes, through every re-cut."""

from __future__ import annotations

import random
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from bagua_client import Configuration, DistributedDataParallel, tune
from bagua_client.algorithms import ByteGradAlgorithm
from bagua_client.reducer import carrier
from tests.client.algorithms.reference import byte_sum, node_sums
from tests.client.algorithms.small import SeesBuckets, summed_gradients
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

STEPS = 20
NODES: dict[int, list[list[int]]] = {2: [[0, 1]], 3: [[0, 1], [2]], 4: [[0, 1], [2, 3]]}


class Seen(SeesBuckets, ByteGradAlgorithm):
    pass


def _model(width: int = 13) -> nn.Sequential:
    torch.manual_seed(3)
    layers = nn.Linear(7, width), nn.Tanh(), nn.Linear(width, width // 2), nn.Tanh()
    return nn.Sequential(*layers, nn.Linear(width // 2, 3))


def _loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(6, 7, generator=generator)
    return model(inputs).square().sum() * (10.0 ** (rank - 1))


def _local(model: nn.Module, rank: int, step: int, passes: int) -> dict[int, np.ndarray]:
    gradients = summed_gradients(model, rank, step, passes, _loss)
    pairs = zip(model.parameters(), gradients, strict=True)
    return {id(weight): gradient.numpy().ravel() for weight, gradient in pairs}


def _wrong_steps(
    hierarchical: str, average: bool, passes: int, range_elements: int | None = None
) -> list[int]:
    """The steps in which a gradient is not what the reference says, bit for bit."""
    # Its chunks are of several ranges, the last of them shorter.
    model = _model() if range_elements is None else _model(width=90)
    algorithm = Seen(hierarchical=False, average=average, range_elements=range_elements)
    ours = DistributedDataParallel(model, algorithm=algorithm, bucket_cap_mb=100 / 2**20)
    ranks, draw = dist.get_world_size(), random.Random(7)
    optimizer = torch.optim.SGD(ours.parameters(), lr=1e-3)
    nodes = NODES[ranks] if hierarchical != "off" and ranks > 2 else [[r] for r in range(ranks)]
    multiple = int(np.lcm(ranks, len(nodes)))
    wrong = []
    for step in range(STEPS):
        if step % 5 == 0:
            size = draw.choice([20, 100, 300, 10_000] if range_elements is None else [10, 10**6])
            assert ours.reconfigure(Configuration(size, hierarchical))
        optimizer.zero_grad()
        parts = [_local(model, rank, step, passes) for rank in range(ranks)]
        for at in range(passes - 1):
            with ours.no_sync():
                _loss(ours, dist.get_rank(), passes * step + at).backward()
        algorithm.buckets = []
        _loss(ours, dist.get_rank(), passes * step + passes - 1).backward()
        found = {id(weight): weight.grad.numpy().ravel() for weight in model.parameters()}
        expected = []
        for bucket in algorithm.buckets:
            flats = [np.concatenate([part[key] for key in bucket]) for part in parts]
            divisor = ranks if average else 1
            sums = node_sums(flats, nodes)
            expected.append(byte_sum(sums, divisor, multiple, range_elements))
        flat = [np.concatenate([found[key] for key in bucket]) for bucket in algorithm.buckets]
        assert sum(map(len, flat)) == sum(weight.numel() for weight in model.parameters())
        if not all(np.array_equal(a, b) for a, b in zip(flat, expected, strict=True)):
            wrong.append(step)
        optimizer.step()
    return wrong


@pytest.mark.parametrize(
    ("pool", "hierarchical", "average", "passes"),
    [
        ("two_ranks", "off", False, 2),
        ("three_ranks", "off", True, 1),
        ("three_ranks", "leaders", True, 1),
        ("four_ranks", "leaders", True, 2),
    ],
)
def test_every_gradient_is_the_references_bit_for_bit_through_recuts(
    request: pytest.FixtureRequest, pool: str, hierarchical: str, average: bool, passes: int
) -> None:
    ranks: RankPool = request.getfixturevalue(pool)
    for wrong in ranks.run(_wrong_steps, hierarchical, average, passes):
        assert wrong == []


def test_ranges_are_the_references_bit_for_bit_through_recuts(two_ranks: RankPool) -> None:
    for wrong in two_ranks.run(_wrong_steps, "off", True, 1, 1024):
        assert wrong == []


def _worst_error(configuration: Configuration, width: int) -> tuple[float, bool]:
    """Of all levels that there are of the gradients, how far the worst is off; and whether all
    ranks have the same bits."""
    model = nn.Linear(width, width)
    ours = DistributedDataParallel(model, algorithm=ByteGradAlgorithm(hierarchical=False))
    assert ours.reconfigure(configuration)
    ranks = dist.get_world_size()
    worst = 0.0
    with mock.patch.object(carrier, "SMALLEST_PART_BYTES", 256):
        for step in range(4):
            inputs = [
                torch.randn(4, width, generator=torch.Generator().manual_seed(9 * step + rank))
                for rank in range(ranks)
            ]
            ours.zero_grad()
            ours(inputs[dist.get_rank()]).square().sum().backward()
            mean = torch.zeros_like(model.weight)
            for each in inputs:
                loss = model(each).square().sum()
                mean += torch.autograd.grad(loss, [model.weight])[0] / ranks
            level = float(mean.max() - mean.min()) / 255
            worst = max(worst, float((model.weight.grad - mean).abs().max()) / level)
    other = model.weight.grad.clone()
    dist.broadcast(other, 0)
    return worst, torch.equal(other, model.weight.grad)


@pytest.mark.parametrize(
    ("hierarchical", "channels", "precision"),
    [("off", 4, "as_is"), ("leaders", 2, "bf16"), ("shards", 2, "as_is")],
)
def test_all_ranks_have_the_same_bits_near_the_mean_in_parts_and_by_node(
    four_ranks: RankPool, hierarchical: str, channels: int, precision: str
) -> None:
    way = Configuration(1000, hierarchical, channels, wire_precision=precision)
    for worst, is_same in four_ranks.run(_worst_error, way, 30):
        assert is_same
        assert 0 < worst < 8


def _kinds_of_weights() -> list[bool]:
    """Of numbers that eight bits are made of, and of others, which travel as they are."""
    found = []
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        model = nn.Linear(8, 8).to(dtype)
        ours = DistributedDataParallel(model, algorithm="bytegrad")
        ours(torch.full((2, 8), dist.get_rank() + 1.0).to(dtype)).sum().backward()
        wanted = torch.full((8, 8), 3.0)
        found.append(torch.allclose(model.weight.grad.float(), wanted, rtol=0.01))
    return found


def test_other_types_of_numbers_travel_too(two_ranks: RankPool) -> None:
    assert two_ranks.run(_kinds_of_weights) == [[True] * 3] * 2


def _mean_of_steps(error_feedback: bool) -> float:
    """How far the mean of 30 steps' gradients is off, when every step has the same ones."""
    model = nn.Linear(40, 10, bias=False)
    algorithm = ByteGradAlgorithm(hierarchical=False, error_feedback=error_feedback)
    ours = DistributedDataParallel(model, algorithm=algorithm)
    given = torch.randn(10, 40, generator=torch.Generator().manual_seed(dist.get_rank()))
    total, mean = torch.zeros(10, 40), given.clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    for step in range(30):
        if step % 10 == 5:
            assert ours.reconfigure(Configuration(1000 + step))
        ours.zero_grad()
        (ours(torch.eye(40)).t() * given).sum().backward()
        total += model.weight.grad
    return float((total / 30 - mean).abs().max())


def test_with_error_feedback_what_is_lost_comes_later_through_recuts(two_ranks: RankPool) -> None:
    lost, fed_back = (max(two_ranks.run(_mean_of_steps, on)) for on in (False, True))
    assert fed_back < lost / 5


def _refused() -> list[str]:
    """What is said to a communication hook, and to ranks that would end one by one."""
    found = []
    ours = DistributedDataParallel(nn.Linear(4, 4), algorithm="bytegrad")
    with pytest.raises(RuntimeError) as raised:
        ours.register_comm_hook(None, default_hooks.allreduce_hook)
    found.append(str(raised.value))
    stock = torch.nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    stock.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError) as raised:
        tune(stock, algorithm="decentralized")
    found.append(str(raised.value))
    ours = DistributedDataParallel(nn.Linear(4, 4), algorithm="decentralized")
    with pytest.raises(RuntimeError) as raised, ours.join():
        pass
    found.append(str(raised.value))
    return found


def test_what_would_take_an_algorithms_place_in_silence_is_refused(two_ranks: RankPool) -> None:
    for bytes_, weights, join in two_ranks.run(_refused):
        assert "algorithm 'bytegrad'" in bytes_
        assert "algorithm 'decentralized'" in weights
        assert "one by one (join) under decentralized" in join

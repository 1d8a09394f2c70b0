"""Weights whose changes go to two neighbours in eight bits: replicas that agree bit for bit."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.algorithms import LowPrecisionDecentralizedAlgorithm
from bagua_client.integrations.distributed_data_parallel import tunable_of
from tests.client.algorithms.reference import in_eight_bits
from tests.client.algorithms.small import loss_of, small_model
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

STEPS, RATE = 20, 0.05
NODES = {2: [[0], [1]], 3: [[0, 1], [2]], 4: [[0, 1], [2, 3]]}


def _ring_step(
    halves: list[torch.Tensor], replicas: dict[str, list[torch.Tensor]]
) -> list[torch.Tensor]:
    """Of one bucket on all members of the ring: their weights afterwards; replicas follow."""
    own, left, right = (replicas[name] for name in ("own", "left", "right"))
    changes = []
    for half, w, a, b in zip(halves, own, left, right, strict=True):
        # Torch's own sums of products, which are rounded once where it fuses them.
        change = half.add(a, alpha=1 / 3).add(b, alpha=1 / 3).add(w, alpha=-5 / 3)
        changes.append(torch.from_numpy(in_eight_bits(change.numpy())))
    count = len(halves)
    for i in range(count):
        left[i] += changes[(i - 1) % count]
        right[i] += changes[(i + 1) % count]
        own[i] += changes[i]
    return [w.clone() for w in own]


class Reference:
    """All ranks' weights, and the ring's replicas, by the place of each weight in the model."""

    def __init__(self, nodes: list[list[int]], interval: int) -> None:
        self.models = [small_model() for node in nodes for _ in node]
        self.nodes, self.interval = nodes, interval
        weights = [p.detach() for p in small_model().parameters()]
        self.replicas = {
            name: [[w.clone() for w in weights] for _ in nodes] for name in ("own", "left", "right")
        }

    def step(self, step: int, buckets: tuple[tuple[int, ...], ...]) -> None:
        for rank, model in enumerate(self.models):
            weights = list(model.parameters())
            gradients = torch.autograd.grad(loss_of(model, rank, step), weights)
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.data.add_(gradient, alpha=-RATE)
        if step % self.interval == 0:
            for bucket in buckets:
                self._exchange(bucket)

    def _exchange(self, bucket: tuple[int, ...]) -> None:
        def flat(values: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([values[i].detach().ravel() for i in bucket])

        halves = []
        for node in self.nodes:
            each = [flat(list(self.models[rank].parameters())) * (1.0 / len(node)) for rank in node]
            halves.append(each[0] + each[1] if len(node) == 2 else each[0])
        flats = {name: [flat(each) for each in of] for name, of in self.replicas.items()}
        mixed = _ring_step(halves, flats)
        for place, node in enumerate(self.nodes):
            for rank in node:
                self._write(list(self.models[rank].parameters()), bucket, mixed[place])
            for name in flats:
                self._write(self.replicas[name][place], bucket, flats[name][place])

    def _write(
        self, values: list[torch.Tensor], bucket: tuple[int, ...], flat: torch.Tensor
    ) -> None:
        sizes = [values[i].numel() for i in bucket]
        for i, part in zip(bucket, flat.split(sizes), strict=True):
            values[i].data.copy_(part.view_as(values[i]))


def _wrong_steps(hierarchical: bool, interval: int) -> list[int]:
    """The steps after which a weight or a replica is not the reference's, bit for bit."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    nodes = NODES[ranks] if hierarchical else [[r] for r in range(ranks)]
    model = small_model()
    ours = DistributedDataParallel(
        model,
        algorithm=LowPrecisionDecentralizedAlgorithm(hierarchical, interval),
        bucket_cap_mb=100 / 2**20,
    )
    optimizer = torch.optim.SGD(ours.parameters(), RATE)
    reference, draw = Reference(nodes, interval), random.Random(5)
    names = [name for name, _ in model.named_parameters()]
    place = next(place for place, node in enumerate(nodes) if rank in node)
    is_leader = rank == nodes[place][0]
    wrong = []
    for step in range(STEPS):
        if step in (5, 10, 15):
            size = draw.choice([20, 300, 10_000])
            assert ours.reconfigure(Configuration(size, "leaders" if hierarchical else "off"))
        optimizer.zero_grad()
        loss_of(ours, rank, step).backward()
        buckets = tunable_of(ours).layout.partition
        optimizer.step()
        reference.step(step, buckets)
        expected = list(reference.models[rank].parameters())
        same = all(torch.equal(a, b) for a, b in zip(model.parameters(), expected, strict=True))
        state = ours.algorithm.state_dict()
        for replica, of in reference.replicas.items():
            if is_leader:
                found = [state[replica][name] for name in names]
                same &= all(torch.equal(a, b) for a, b in zip(found, of[place], strict=True))
        if not same:
            wrong.append(step)
    return wrong


@pytest.mark.parametrize(
    ("pool", "hierarchical", "interval"),
    [
        ("two_ranks", False, 1),
        ("three_ranks", True, 1),
        ("four_ranks", False, 3),
    ],
)
def test_weights_and_replicas_are_the_references_bit_for_bit_through_recuts(
    request: pytest.FixtureRequest, pool: str, hierarchical: bool, interval: int
) -> None:
    ranks: RankPool = request.getfixturevalue(pool)
    for wrong in ranks.run(_wrong_steps, hierarchical, interval):
        assert wrong == []


def _replicas(channels: int) -> dict[str, torch.Tensor]:
    model = nn.Linear(40, 40)
    algorithm = LowPrecisionDecentralizedAlgorithm(hierarchical=False)
    ours = DistributedDataParallel(model, algorithm=algorithm)
    optimizer = torch.optim.SGD(ours.parameters(), RATE)
    for step in range(6):
        if step == 3:
            assert ours.reconfigure(Configuration(100, channels=channels))
        optimizer.zero_grad()
        ours(torch.randn(3, 40) + dist.get_rank()).square().mean().backward()
        optimizer.step()
    state = ours.algorithm.state_dict()
    return {name: state[name]["weight"] for name in ("own", "left", "right")}


def test_neighbours_know_the_same_of_each_rank(four_ranks: RankPool) -> None:
    found = four_ranks.run(_replicas, 4)
    for rank, replicas in enumerate(found):
        assert torch.equal(replicas["own"], found[(rank - 1) % 4]["right"])
        assert torch.equal(replicas["own"], found[(rank + 1) % 4]["left"])
    assert not torch.equal(found[0]["own"], found[1]["own"])


def _other_way() -> bool:
    model = small_model()
    ours = DistributedDataParallel(model, algorithm="low_precision_decentralized")
    assert ours.configuration.hierarchical == "leaders"
    return ours.reconfigure(Configuration(hierarchical="off"))


def test_the_way_to_reduce_stays_as_replicas_hold_for_one_only(four_ranks: RankPool) -> None:
    assert four_ranks.run(_other_way) == [False] * 4


def test_an_interval_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="communication_interval"):
        LowPrecisionDecentralizedAlgorithm(communication_interval=0)

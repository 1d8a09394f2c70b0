"""Weights that are averaged while gradients are computed, with all ranks or with one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.algorithms import (
    AsyncModelAverageAlgorithm,
    DecentralizedAlgorithm,
    LowPrecisionDecentralizedAlgorithm,
)
from bagua_client.algorithms.decentralized import peer_of
from bagua_client.integrations.distributed_data_parallel import tunable_of
from tests.client.algorithms.reference import in_eight_bits
from tests.client.algorithms.small import loss_of, small_model, summed_gradients
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

STEPS, RATE = 20, 0.05
NODES = {2: [[0, 1]], 3: [[0, 1], [2]], 4: [[0, 1], [2, 3]]}


def _flat(values: list[torch.Tensor]) -> np.ndarray:
    return np.concatenate([value.detach().numpy().ravel() for value in values])


class Reference:
    """All replicas of a training, side by side."""

    def __init__(self, ranks: int, mode: str, interval: int, nodes: list[list[int]]) -> None:
        self.models = [small_model() for _ in range(ranks)]
        self.mode, self.interval, self.nodes = mode, interval, nodes
        self.exchanges = 0

    def step(self, step: int, passes: int) -> None:
        gradients = [
            _flat(summed_gradients(model, rank, step, passes))
            for rank, model in enumerate(self.models)
        ]
        weights = [_flat(list(model.parameters())) for model in self.models]
        mixed = weights if step % self.interval else self._mixed(weights)
        for rank, (flat, gradient) in enumerate(zip(mixed, gradients, strict=True)):
            self.write(rank, flat - np.float32(RATE) * gradient)

    def _mixed(self, weights: list[np.ndarray]) -> list[np.ndarray]:
        means = [np.mean([weights[rank] for rank in node], axis=0) for node in self.nodes]
        count = len(means)
        if self.mode == "all":
            share = [len(node) / len(weights) for node in self.nodes]
            whole = sum(mean * part for mean, part in zip(means, share, strict=True))
            mixed = [whole.astype(np.float32)] * count
        else:
            mixed = []
            for node in range(count):
                half, s = count // 2, self.exchanges
                other = (s + node) % half + half if node < half else (node - half - s) % half
                mixed.append((means[node] + means[other]) / np.float32(2))
        self.exchanges += 1
        of = {rank: node for node, ranks in enumerate(self.nodes) for rank in ranks}
        return [mixed[of[rank]] for rank in range(len(weights))]

    def write(self, rank: int, flat: np.ndarray) -> None:
        start = 0
        for weight in self.models[rank].parameters():
            values = torch.from_numpy(flat[start : start + weight.numel()])
            weight.data.copy_(values.view_as(weight))
            start += weight.numel()


def _furthest(mode: str, interval: int, hierarchical: str, passes: int) -> float:
    """How far the weights are ever from the reference's."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    algorithm = DecentralizedAlgorithm(hierarchical != "off", mode, interval)
    model = small_model()
    ours = DistributedDataParallel(model, algorithm=algorithm, bucket_cap_mb=100 / 2**20)
    optimizer = torch.optim.SGD(ours.parameters(), RATE)
    nodes = NODES[ranks] if hierarchical != "off" and ranks > 2 else [[r] for r in range(ranks)]
    reference, draw = Reference(ranks, mode, interval, nodes), random.Random(5)
    furthest = 0.0
    for step in range(STEPS):
        if step in (5, 10, 15):
            size, channels = draw.choice([20, 300, 10_000]), draw.choice([1, 2])
            assert ours.reconfigure(Configuration(size, hierarchical, channels))
        optimizer.zero_grad()
        for at in range(passes - 1):
            with ours.no_sync():
                loss_of(ours, rank, passes * step + at).backward()
        loss_of(ours, rank, passes * step + passes - 1).backward()
        optimizer.step()
        with torch.no_grad():
            ours.eval()
            ours(torch.ones(1, 7))
            ours.train()
        reference.step(step, passes)
        found, expected = (
            _flat(list(each.parameters())) for each in (model, reference.models[rank])
        )
        furthest = max(furthest, float(np.abs(found - expected).max()))
    return furthest


@pytest.mark.parametrize(
    ("pool", "mode", "interval", "hierarchical", "passes"),
    [
        ("two_ranks", "all", 1, "off", 2),
        ("three_ranks", "all", 3, "leaders", 1),
        ("three_ranks", "shift_one", 1, "leaders", 1),
        ("four_ranks", "shift_one", 3, "off", 2),
        ("four_ranks", "shift_one", 1, "shards", 1),
    ],
)
def test_every_replica_is_the_references_through_recuts(
    request: pytest.FixtureRequest,
    pool: str,
    mode: str,
    interval: int,
    hierarchical: str,
    passes: int,
) -> None:
    ranks: RankPool = request.getfixturevalue(pool)
    for furthest in ranks.run(_furthest, mode, interval, hierarchical, passes):
        assert furthest < 1e-6


@pytest.mark.parametrize("ranks", [2, 4, 6, 8, 14, 64])
def test_partners_are_of_opposite_halves_and_each_meets_each_once_in_half_as_many_exchanges(
    ranks: int,
) -> None:
    half = ranks // 2
    met: dict[int, list[int]] = {rank: [] for rank in range(ranks)}
    for exchange in range(half):
        for rank in range(ranks):
            peer = peer_of(rank, exchange, ranks)
            assert peer_of(peer, exchange, ranks) == rank
            assert (peer < half) != (rank < half)
            assert peer == peer_of(rank, exchange + half, ranks)
            met[rank].append(peer)
    for rank, peers in met.items():
        others = range(half, ranks) if rank < half else range(half)
        assert sorted(peers) == list(others)


def _refused(hierarchical: bool, configuration: Configuration | None) -> str:
    algorithm = DecentralizedAlgorithm(hierarchical, "shift_one")
    try:
        ours = DistributedDataParallel(small_model(), algorithm=algorithm)
    except ValueError as error:
        return str(error)
    assert configuration is not None
    return "" if ours.reconfigure(configuration) else "disagreed"


def test_an_odd_number_cannot_be_paired_and_all_ranks_are_told(three_ranks: RankPool) -> None:
    for said in three_ranks.run(_refused, False, None):
        assert "pairs the ranks, and 3 cannot be paired" in said
        assert "hierarchical=True" in said
    assert three_ranks.run(_refused, True, Configuration(hierarchical="off")) == ["disagreed"] * 3


def _local_buffers() -> list[float]:
    model = nn.BatchNorm1d(2)
    ours = DistributedDataParallel(model, algorithm="decentralized")
    for _ in range(2):
        ours(torch.randn(4, 2) + dist.get_rank()).sum().backward()
    return [float(model.running_mean.sum()), float(model.weight.grad.abs().sum())]


def test_buffers_and_gradients_stay_local(two_ranks: RankPool) -> None:
    torch.manual_seed(1)
    (first, _), (second, _) = two_ranks.run(_local_buffers)
    assert first != second


def _moved_though_equal(dtype: torch.dtype) -> dict[str, bool]:
    """Whether averaging changes weights that all ranks have the same of, by what averages."""
    made: dict[str, dict[str, Any]] = {
        "flat": {"algorithm": DecentralizedAlgorithm(hierarchical=False)},
        "by node": {"algorithm": DecentralizedAlgorithm()},
        "in pairs, by node": {"algorithm": DecentralizedAlgorithm(True, "shift_one")},
        "async": {"algorithm": AsyncModelAverageAlgorithm()},
        "where it ends": {},
    }
    moved = {}
    for name, options in made.items():
        torch.manual_seed(0)
        layer = nn.Linear(40, 40).to(dtype)
        before = layer.weight.detach().clone()
        model = DistributedDataParallel(layer, **options)
        still = torch.optim.SGD(model.parameters(), 0.0)
        for step in range(3):
            if not options:
                chosen = "decentralized" if step == 0 else ""
                assert model.reconfigure(Configuration(algorithm=chosen))
            model(torch.ones(1, 40, dtype=dtype)).float().sum().backward()
            still.step()
            still.zero_grad()
        if name == "async":
            model.algorithm.abort(model, average=True)  # type: ignore[attr-defined]
        moved[name] = not torch.equal(before, layer.weight)
    return moved


def test_averaging_leaves_equal_replicas_as_they_are(three_ranks: RankPool) -> None:
    for moved in three_ranks.run(_moved_though_equal, torch.bfloat16):
        assert moved == dict.fromkeys(moved, False)


RINGS = {2: [[0], [1]], 3: [[0, 1], [2]], 4: [[0, 1], [2, 3]]}


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


class RingReference:
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
    nodes = RINGS[ranks] if hierarchical else [[r] for r in range(ranks)]
    model = small_model()
    ours = DistributedDataParallel(
        model,
        algorithm=LowPrecisionDecentralizedAlgorithm(hierarchical, interval),
        bucket_cap_mb=100 / 2**20,
    )
    optimizer = torch.optim.SGD(ours.parameters(), RATE)
    reference, draw = RingReference(nodes, interval), random.Random(5)
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
    [("two_ranks", False, 1), ("three_ranks", True, 1), ("four_ranks", False, 3)],
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

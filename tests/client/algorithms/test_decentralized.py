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
from bagua_client.algorithms import AsyncModelAverageAlgorithm, DecentralizedAlgorithm
from bagua_client.algorithms.decentralized import peer_of
from tests.client.algorithms.small import loss_of, small_model
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
        replicas = [list(model.parameters()) for model in self.models]
        gradients = []
        for rank, model in enumerate(self.models):
            sums = [torch.zeros_like(weight) for weight in replicas[rank]]
            for at in range(passes):
                loss = loss_of(model, rank, passes * step + at)
                for total, each in zip(
                    sums, torch.autograd.grad(loss, replicas[rank]), strict=True
                ):
                    total += each
            gradients.append(_flat(sums))
        weights = [_flat(weights) for weights in replicas]
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


@pytest.mark.parametrize("wrong", [{"peer_selection_mode": "some"}, {"communication_interval": 0}])
def test_arguments_outside_their_domain_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DecentralizedAlgorithm(**wrong)  # type: ignore[arg-type]


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

"""Parameters and gradients of a sharded model in eight bits: what arrives, bit for bit, and what a
training makes of it."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard

import bagua_client
from bagua_client.algorithms import QuantizedAlgorithm, find
from bagua_client.communication import link
from bagua_client.communication.link import Link
from bagua_client.integrations.sharded_model import tunable_of
from tests.client.algorithms.reference import in_eight_bits
from tests.client.communication.test_link import groups_of
from tests.client.sharded.models import Kind, sharded, state_of, train
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RANGE = 1024


def _numbers(elements: int, dtype: str, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(elements, generator=generator).to(DTYPES[dtype])


def _exchanged(ranks: int, stripes: int, elements: int, dtype: str) -> Any:
    groups, rank = groups_of(ranks, stripes), dist.get_rank()
    if rank >= ranks:
        return None
    algorithm = QuantizedAlgorithm()
    with mock.patch.multiple(link, SMALLEST_STRIPE_BYTES=64, ALIGNED_ELEMENTS=2):
        own = _numbers(ranks * elements, dtype, rank).view(ranks, elements)
        gathered = torch.empty_like(own)
        algorithm.gather(Link(groups), own[0].clone(), gathered)
        found = [gathered]
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            found.append(torch.empty_like(own[0]))
            algorithm.reduce(Link(groups), own.clone(), found[-1], op, 0)
    return [each.float().numpy() for each in found]


def _rounded(numbers: Any, dtype: str) -> Any:
    return torch.from_numpy(np.asarray(numbers)).to(DTYPES[dtype]).float().numpy()


@settings(max_examples=10)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 2100), st.sampled_from(sorted(DTYPES)))
def test_what_arrives_is_the_references_bit_for_bit(
    four_ranks: RankPool, ranks: int, stripes: int, elements: int, dtype: str
) -> None:
    found = four_ranks.run(_exchanged, ranks, stripes, elements, dtype)
    own = [
        _numbers(ranks * elements, dtype, rank).float().numpy().reshape(ranks, elements)
        for rank in range(ranks)
    ]
    sent = [[in_eight_bits(row, RANGE) for row in rows] for rows in own]
    for rank in range(ranks):
        gathered, total, mean = found[rank]
        assert np.array_equal(gathered, _rounded([rows[0] for rows in sent], dtype))
        expected = sent[0][rank]
        for rows in sent[1:]:
            expected = expected + rows[rank]
        assert np.array_equal(total, _rounded(expected, dtype))
        assert np.array_equal(mean, _rounded(expected / np.float32(ranks), dtype))


def _by_node(algorithm: str) -> list[Any]:
    """A gather and a reduction over two nodes of two ranks; of whole numbers."""
    model: Any = bagua_client.tune(sharded(Kind()), algorithm=algorithm)
    train(model, Kind(), {}, 1)
    tunable = tunable_of(model)
    configuration = replace(tunable.default, hierarchical="shards", channels=2)
    assert model.reconfigure(configuration)
    train(model, Kind(), {}, 1)
    assert tunable.layout.configuration == configuration
    group, traffic, rank = tunable.units[0].own_group, tunable._held.traffic, dist.get_rank()
    own = torch.arange(4 * 300.0).view(4, 300) * (1 + rank) % 97
    gathered, part = torch.empty(4 * 300), torch.empty(300)
    with mock.patch.multiple(link, SMALLEST_STRIPE_BYTES=64, ALIGNED_ELEMENTS=2):
        traffic.gather(traffic.route(0, group, False), own[0].clone(), gathered)
        whole, average = own.clone().view(-1), dist.ReduceOp.AVG
        traffic.reduce(traffic.route(0, group, True), 0, part, whole, average)
    return [own.numpy(), gathered.view(4, 300).numpy(), part.numpy()]


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "quantized"])
def test_by_node_only_what_crosses_nodes_is_rounded(algorithm: str) -> None:
    nodes = RankPool([2, 2])
    try:
        found = nodes.run(_by_node, algorithm)
    finally:
        nodes.close()
    own = np.stack([each[0] for each in found])
    is_exact = algorithm == "gradient_allreduce"
    sent = own[:, 0] if is_exact else np.stack([in_eight_bits(row, RANGE) for row in own[:, 0]])
    for rank, (_, gathered, part) in enumerate(found):
        assert np.array_equal(gathered, sent)
        of_nodes = [own[node : node + 2, rank].sum(axis=0) / np.float32(2) for node in (0, 2)]
        if not is_exact:
            of_nodes = [in_eight_bits(each, RANGE) for each in of_nodes]
        assert np.array_equal(part, (of_nodes[0] + of_nodes[1]) / np.float32(2))


def _trained(algorithm: Any, lr: float = 1e-2) -> tuple[list[float], dict[str, Any], bool]:
    """Losses, the weights, and whether they are as they were at first."""
    model: Any = bagua_client.tune(sharded(Kind()), algorithm=algorithm)
    first = state_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    losses, _ = train(model, Kind(), {}, 12, optimizer)
    last = state_of(model)
    return losses, last, all(torch.equal(first[name], last[name]) for name in first)


@pytest.mark.parametrize("algorithm", ["quantized_weights", "quantized_gradients"])
def test_a_training_goes_as_well_and_its_weights_stay_exact(
    two_ranks: RankPool, algorithm: str
) -> None:
    exact = two_ranks.run(_trained, "gradient_allreduce")
    ours = two_ranks.run(_trained, algorithm)
    for (losses, weights, _), (expected, _, _) in zip(ours, exact, strict=True):
        assert losses != expected
        assert losses == pytest.approx(expected, abs=0.01 * expected[0])
        assert losses[-1] < losses[0] / 4
        assert all(torch.equal(weights[name], ours[0][1][name]) for name in weights)
    # With a learning rate of 0 whatever is rounded on the way must leave no trace.
    assert [same for _, _, same in two_ranks.run(_trained, algorithm, 0.0)] == [True, True]


def _trained_as(kind: Kind, algorithm: str) -> list[float]:
    model: Any = bagua_client.tune(sharded(kind), algorithm=algorithm)
    return train(model, kind, {}, 8)[0]


@pytest.mark.parametrize(
    "kind",
    [
        Kind(micro_batches=(3,), clips=True, tied=True, frozen=True),
        Kind(param_dtype=torch.bfloat16, checkpoints=True, between="evaluation after step"),
        Kind(offloads=True, compiles="blocks", ignores=True),
    ],
    ids=["accumulated-tied-and-frozen", "bfloat16-evaluated", "offloaded"],
)
def test_it_goes_as_well_however_it_is_trained(two_ranks: RankPool, kind: Kind) -> None:
    exact = two_ranks.run(_trained_as, kind, "gradient_allreduce")
    for losses, expected in zip(two_ranks.run(_trained_as, kind, "quantized"), exact, strict=True):
        assert losses != expected
        assert losses == pytest.approx(expected, abs=0.05 * max(map(abs, expected)))


def test_copies_of_a_model_in_eight_bits(four_ranks: RankPool) -> None:
    exact = four_ranks.run(_trained_as, Kind(replicas=2), "gradient_allreduce")
    found = four_ranks.run(_trained_as, Kind(replicas=2), "quantized")
    for losses, expected in zip(found, exact, strict=True):
        assert losses == pytest.approx(expected, abs=0.02 * max(expected))


def _resumed() -> tuple[list[float], list[float]]:
    """The losses of a training, and of one that goes on from its state in the midst of it."""
    ours: Any = bagua_client.tune(sharded(Kind()), algorithm="quantized")
    _, optimizer = train(ours, Kind(), {}, 5)
    state = deepcopy({"model": ours.state_dict(), "optimizer": optimizer.state_dict()})
    losses, _ = train(ours, Kind(), {}, 10, optimizer, first=5)
    again: Any = bagua_client.tune(sharded(Kind()), algorithm="quantized")
    again.load_state_dict(state["model"])
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
    optimizer.load_state_dict(state["optimizer"])
    return losses, train(again, Kind(), {}, 10, optimizer, first=5)[0]


def test_a_training_goes_on_from_its_checkpoint_as_if_it_had_not_stopped(
    two_ranks: RankPool,
) -> None:
    for losses, resumed in two_ranks.run(_resumed):
        assert resumed == losses


def _back_to_exact() -> list[str]:
    """What differs between a model that went back to exact numbers and an untouched one that goes
    on from its state."""
    ours: Any = bagua_client.tune(sharded(Kind()))
    changes = {
        1: {"algorithm": "quantized", "kept_units": 2},
        4: {"algorithm": "quantized_weights"},
    }
    _, optimizer = train(ours, Kind(), {**changes, 6: {}}, 6)
    state, moments = ours.state_dict(), deepcopy(optimizer.state_dict())
    other = sharded(Kind())
    other.load_state_dict(state)
    theirs = torch.optim.AdamW(other.parameters(), lr=1e-2)
    theirs.load_state_dict(moments)
    assert ours.reconfigure(tunable_of(ours).default)
    found, _ = train(ours, Kind(), {}, 10, optimizer, first=6)
    expected, _ = train(other, Kind(), {}, 10, theirs, first=6)
    assert found == expected
    one, two = state_of(ours), state_of(other)
    return [name for name in one if not torch.equal(one[name], two[name])]


def test_nothing_of_it_is_left_when_it_ends(two_ranks: RankPool) -> None:
    assert two_ranks.run(_back_to_exact) == [[], []]


def _mean_error(error_feedback: bool) -> float:
    """How far the mean of 30 steps' gradients is off, when every step has the same ones."""
    model = fully_shard(nn.Linear(40, 10, bias=False))
    algorithm = QuantizedAlgorithm(weights=False, error_feedback=error_feedback)
    ours: Any = bagua_client.tune(model, algorithm=algorithm)
    given_ones = torch.randn(10, 40, generator=torch.Generator().manual_seed(dist.get_rank()))
    total, mean = torch.zeros(10, 40), given_ones.clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    for _ in range(30):
        ours.zero_grad()
        (ours(torch.eye(40)).t() * given_ones).sum().backward()
        total += ours.weight.grad.full_tensor()
    return float((total / 30 - mean).abs().max())


def test_with_error_feedback_what_is_lost_comes_later(two_ranks: RankPool) -> None:
    lost, fed_back = (max(two_ranks.run(_mean_error, on)) for on in (False, True))
    assert fed_back < lost / 5


def _skipped() -> list[bool]:
    """Whether each step was skipped, with an infinite gradient on one rank in the third."""
    model = fully_shard(nn.Linear(4, 4))
    ours: Any = bagua_client.tune(model, algorithm=QuantizedAlgorithm(error_feedback=True))
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    skipped = []
    for step in range(5):
        before = ours.weight.full_tensor().detach().clone()
        optimizer.zero_grad()
        loss = ours(torch.ones(2, 4)).sum()
        if step == 2 and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        skipped.append(torch.equal(before, ours.weight.full_tensor()))
    return skipped


def test_an_infinite_gradient_is_seen_by_all_and_not_remembered(two_ranks: RankPool) -> None:
    assert two_ranks.run(_skipped) == [[False, False, True, False, False]] * 2


def _refused() -> list[str]:
    said = []
    for algorithm in ("bytegrad", find("gradient_allreduce")):
        if not isinstance(algorithm, str):
            algorithm = type(algorithm)(average=False)
        try:
            bagua_client.tune(sharded(Kind()), algorithm=algorithm)
        except ValueError as error:
            said.append(str(error))
    try:
        bagua_client.DistributedDataParallel(nn.Linear(2, 2), algorithm="quantized")
    except ValueError as error:
        said.append(str(error))
    ours = bagua_client.tune(sharded(Kind()), algorithm="quantized")
    try:
        bagua_client.tune(ours, algorithm="quantized_weights")
    except ValueError as error:
        said.append(str(error))
    return said


def test_what_is_not_for_a_model_is_refused(two_ranks: RankPool) -> None:
    for said in two_ranks.run(_refused):
        assert said == [
            "bytegrad is not for a model that fully_shard shards",
            "gradient_allreduce is not for a model that fully_shard shards",
            "quantized is for sharded models, and this one is replicated",
            "the model is already tuned with algorithm 'quantized'; give 'quantized_weights' "
            "there, or start the script without bagua_client's launcher",
        ]


def _offered(allowed: set[str]) -> list[list[Any]]:
    model: Any = bagua_client.tune(sharded(Kind()))
    train(model, Kind(), {}, 1)
    tunable = tunable_of(model)
    values = tunable.offer.values(allowed)
    return [list(values.get("algorithm", ())), list(values.get("hierarchical", ()))]


def test_they_are_tried_only_where_they_are_listed(two_ranks: RankPool) -> None:
    assert two_ranks.run(_offered, set()) == [[[], []]] * 2
    listed = {"quantized", "bytegrad", "quantized_gradients"}
    names = ["gradient_allreduce", "quantized", "quantized_gradients"]
    assert two_ranks.run(_offered, listed) == [[names, []]] * 2

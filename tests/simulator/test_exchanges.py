"""What crosses a node's link under each algorithm."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bagua_simulator import Cluster
from bagua_simulator.algorithms import ALGORITHMS, SHIFT_ONE, Sends, exchange
from bagua_simulator.collectives import Phase
from bagua_simulator.workloads import load
from tests.simulator.jobs import MIB, make_cluster

pytestmark = pytest.mark.slow

CHUNKS = ALGORITHMS["bytegrad"]
RING = ALGORITHMS["low_precision_decentralized"]
PAIR = ALGORITHMS[SHIFT_ONE]


def sent_bytes(phases: tuple[Phase, ...]) -> float:
    return sum(phase.bytes for phase in phases if phase.link == "network")


@pytest.mark.parametrize(("model", "megabytes"), [("bert-base", 110.4), ("vgg16", 138.7)])
def test_bytegrad_sends_what_was_counted_on_two_hosts(model: str, megabytes: float) -> None:
    """reports/2026-11-algorithms.md."""
    size_bytes = sum(tensor.bytes for tensor in load(model).tensors)
    sent = sent_bytes(exchange(make_cluster(2, 1), CHUNKS, "off", size_bytes))
    assert sent / 1e6 == pytest.approx(megabytes, rel=0.003)


@pytest.mark.parametrize("nodes", [2, 4, 16])
@pytest.mark.parametrize("way", ["off", "leaders", "shards"])
def test_bytes_are_those_of_the_documented_formulas(nodes: int, way: str) -> None:
    """docs/algorithms.md, with one rank on a node, and as many for nodes that sum up first."""
    cluster = make_cluster(nodes, 1 if way == "off" else 8)
    numbers = 25 * MIB // 4
    packed = numbers + numbers / 512
    share = 2 * (nodes - 1) / nodes
    assert sent_bytes(exchange(cluster, CHUNKS, way, 4 * numbers)) == pytest.approx(share * packed)
    assert sent_bytes(exchange(cluster, Sends(), way, 4 * numbers)) == share * 4 * numbers
    if way in RING.ways:
        neighbours = min(2, nodes - 1)
        sent = sent_bytes(exchange(cluster, RING, way, 4 * numbers))
        assert sent == pytest.approx(neighbours * packed)
        assert sent_bytes(exchange(cluster, PAIR, way, 4 * numbers)) == 4 * numbers


def test_flat_every_rank_of_a_node_sends_its_chunks_over_the_nodes_link() -> None:
    flat = sent_bytes(exchange(make_cluster(4, 8), CHUNKS, "off", 25 * MIB))
    by_node = sent_bytes(exchange(make_cluster(4, 8), CHUNKS, "leaders", 25 * MIB))
    assert flat > 4 * by_node


@pytest.mark.parametrize("sends", ALGORITHMS.values(), ids=list(ALGORITHMS))
def test_one_rank_sends_nothing_and_one_node_nothing_to_others(sends: Sends) -> None:
    assert exchange(Cluster(1, 1, 1e9, 1e-4), sends, "off", MIB) == ()
    inside = exchange(make_cluster(1, 8), sends, "off", MIB)
    assert inside
    assert sent_bytes(inside) == 0


def test_what_is_packed_has_a_cost_that_a_full_link_does_not_hide() -> None:
    fast = replace(
        make_cluster(2, 1),
        bandwidth_bytes_per_second=1e15,
        inside_bandwidth_bytes_per_second=1e15,
        half_seconds=0.0,
    )
    plain, packed = (
        sum(phase.alone_seconds for phase in exchange(fast, sends, "off", 100 * MIB))
        for sends in (Sends(), CHUNKS)
    )
    assert packed > plain


def test_a_way_that_an_algorithm_does_not_work_with_is_refused() -> None:
    for sends in (RING, PAIR):
        with pytest.raises(ValueError, match="'shards'; it must be off, leaders"):
            exchange(make_cluster(), sends, "shards", MIB)

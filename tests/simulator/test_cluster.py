"""What one reduction costs, and what crosses a node's link under each algorithm."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_simulator import Cluster
from bagua_simulator.algorithms import ALGORITHMS, SHIFT_ONE, Sends, exchange
from bagua_simulator.cluster import Phase, reduction
from bagua_simulator.workloads import load
from tests.simulator.jobs import MIB, make_cluster

pytestmark = pytest.mark.slow


KINDS = st.sampled_from(["off", "leaders", "shards"])
CLUSTERS = st.builds(
    make_cluster,
    nodes=st.integers(1, 32),
    ranks_per_node=st.integers(1, 8),
    bandwidth=st.floats(1e7, 1e11),
    latency_seconds=st.floats(0, 1e-2),
)
BYTES = st.integers(1, 2**30)


def seconds(cluster: Cluster, kind: str, size_bytes: float) -> float:
    return sum(phase.alone_seconds for phase in reduction(cluster, kind, size_bytes))


@given(CLUSTERS, KINDS, BYTES, BYTES)
def test_more_bytes_take_longer(cluster: Cluster, kind: str, one: int, other: int) -> None:
    less, more = sorted((one, other))
    assert seconds(cluster, kind, less) <= seconds(cluster, kind, more) * (1 + 1e-12)


@given(CLUSTERS, KINDS, BYTES, st.floats(1, 100))
def test_a_faster_network_takes_no_longer(
    cluster: Cluster, kind: str, size: int, factor: float
) -> None:
    bandwidth = cluster.bandwidth_bytes_per_second * factor
    faster = replace(cluster, bandwidth_bytes_per_second=bandwidth)
    nearer = replace(cluster, latency_seconds=cluster.latency_seconds / factor)
    for better in (faster, nearer):
        assert seconds(better, kind, size) <= seconds(cluster, kind, size) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("ranks", "mib", "share"),
    # Of a message; where it is 1, a tree. NCCL expects little of trees between 16 and 64 MiB.
    [
        (2, 9, 1.0),
        (2, 32, 1.5),
        (2, 100, 1.0),
        (2, 3, 1.5),
        (4, 32, 1.0),
        (4, 3, 1.75),
        (1, 32, 1.0),
    ],
)
def test_over_two_nodes_nccl_sums_by_the_ring_or_tree_that_it_expects_more_of(
    ranks: int, mib: int, share: float
) -> None:
    cluster = replace(make_cluster(nodes=2, ranks_per_node=ranks), is_nccl=True)
    (phase,) = reduction(cluster, "off", mib * MIB)
    assert phase.bytes == share * mib * MIB
    (gloo,) = reduction(replace(cluster, is_nccl=False), "off", mib * MIB)
    assert gloo.bytes == 2 * (2 * ranks - 1) / (2 * ranks) * mib * MIB


def test_two_cores_of_a_node_carry_more_than_one_but_no_more_than_the_link() -> None:
    cores = replace(make_cluster(nodes=2), is_nccl=True, flow_bytes_per_second=2e8)
    most = {mib: reduction(cores, "off", mib * MIB)[0].most for mib in (32, 100)}
    assert most[32] > 1.5 * most[100]
    link = replace(cores, flow_bytes_per_second=1e9)
    (phase,) = reduction(link, "off", 32 * MIB)
    assert phase.most < link.bandwidth_bytes_per_second * link.flow_share


@pytest.mark.parametrize(
    ("flow", "together", "weight"), [(2e8, 1.25, 0.8), (2e8, 1.0, 1.0), (2e9, 1.25, 1.0)]
)
def test_what_a_link_carries_does_not_depend_on_who_sends(
    flow: float, together: float, weight: float
) -> None:
    """It does where several connections were measured to carry more than one: cores may copy."""
    cluster = replace(
        make_cluster(nodes=2), is_nccl=True, flow_bytes_per_second=flow, together=together
    )
    (ring,) = reduction(cluster, "off", 32 * MIB)
    assert ring.weight == pytest.approx(weight)
    for kind, mib in (("off", 100), ("shards", 32)):
        assert {phase.weight for phase in reduction(cluster, kind, mib * MIB)} == {1.0}


def test_a_hierarchical_reduction_leaves_the_node_with_less() -> None:
    cluster, size = make_cluster(nodes=4, ranks_per_node=8), 32 * MIB
    (flat,) = reduction(cluster, "off", size)
    assert flat.bytes == pytest.approx(2 * 31 / 32 * size)
    for kind, inside_bytes in (("leaders", size), ("shards", 7 / 8 * size)):
        first, across, last = reduction(cluster, kind, size)
        assert across.bytes == pytest.approx(2 * 3 / 4 * size)
        assert [first.link, across.link, last.link] == ["inside", "network", "inside"]
        assert first.bytes == last.bytes == pytest.approx(inside_bytes)


def test_shards_together_fill_what_one_flow_cannot() -> None:
    cluster = replace(make_cluster(ranks_per_node=8), flow_bytes_per_second=2e8)
    across = {kind: reduction(cluster, kind, 64 * MIB)[1].most for kind in ("leaders", "shards")}
    assert across["leaders"] < 2e8
    assert 4 * across["leaders"] < across["shards"] < cluster.bandwidth_bytes_per_second


def test_a_small_message_reaches_less_bandwidth() -> None:
    (small,) = reduction(make_cluster(), "off", 16 * 1024)
    (large,) = reduction(make_cluster(), "off", 64 * MIB)
    assert small.most < large.most / 2


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


@pytest.mark.parametrize("nodes", [2, 16])
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
    for way in sends.ways:
        inside = exchange(make_cluster(1, 8), sends, way, MIB)
        assert {phase.link for phase in inside} == {"inside"}


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

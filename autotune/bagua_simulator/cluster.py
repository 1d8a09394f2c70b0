"""The machines and the links between them, a link's figures as people write them (``25Gbit``,
``100us``), and how one bucket's reduction uses the links, phase by phase.

Numbers of hops and the choice between ring and tree follow NCCL's own tuning model
(``src/graph/tuning.cc``): a ring's latency grows with the ranks and a tree's with their logarithm,
while a tree has 92 % of the ring's bandwidth. Volumes are those of Thakur, Rabenseifner and Gropp,
"Optimization of Collective Communication Operations in MPICH" (2005). A small message does not fill
a link: the bandwidth that it reaches rises with its size, more slowly than from latency alone.

Over two nodes with several ranks each the two differ in what crosses the link. A ring over ``n``
ranks takes ``2 (n - 1) / n`` of the message out of each node. A tree sums inside the node first:
one node sends its sum, the other sends the total back, so each link carries the message once.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, get_args

Link = Literal["network", "inside"]
# The share of its rate that a link loses to congestion for each further flow.
SHARING_LOSS = 0.01


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal numbers of ranks, each with one full-duplex link to the others.

    The figures inside a node are by default those of 8 GPUs on NVLink as nccl-tests reports them
    for a DGX-1 (bus bandwidth of the order of 100 GB/s); a node with PCIe only has about 10 GB/s.

    Attributes:
        bandwidth_bytes_per_second: of a node's link, each way.
        latency_seconds: of one message between two nodes.
        flow_share: the largest share of a link that one collective alone fills.
        flow_bytes_per_second: the largest rate of one collective alone; infinite with RDMA, a few
            gigabytes over TCP, where processor cores copy.
        half_seconds: a message that the link carries in this time reaches half of ``flow_share``.
        start_seconds: until all ranks have begun a collective, whatever its size.
        shards_share: share of the bandwidth inside a node that reduce-scatter and all-gather reach,
            while reduce and broadcast reach all of it; less if the backend emulates them.
        together: how much more all flows together carry where a node's rank that sends is not the
            one that receives. 1 if ``bandwidth_bytes_per_second`` is the link's; more if it may be
            what the cores copy.
        is_nccl: whether NCCL sums, which may take a tree for a flat sum over two nodes; gloo has
            rings only.
    """

    nodes: int
    ranks_per_node: int
    bandwidth_bytes_per_second: float
    latency_seconds: float
    inside_bandwidth_bytes_per_second: float = 100e9
    inside_latency_seconds: float = 4e-6
    flow_share: float = 0.93
    flow_bytes_per_second: float = math.inf
    half_seconds: float = 40e-6
    start_seconds: float = 15e-6
    shards_share: float = 1.0
    together: float = 1.0
    is_nccl: bool = False

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.ranks_per_node < 1:
            raise ValueError(
                f"a cluster of {self.nodes} nodes of {self.ranks_per_node} ranks has no rank"
            )
        for name in ("bandwidth_bytes_per_second", "inside_bandwidth_bytes_per_second"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive and finite")
        if not 0 <= self.latency_seconds < math.inf:
            raise ValueError(f"latency_seconds is {self.latency_seconds}; it must not be negative")
        for name in ("flow_share", "shards_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be above 0 and at most 1"
                )

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def capacity(self, link: Link, flows: int) -> float:
        """Return the bytes per second, in each direction, of so many flows together on a node's
        link.
        """
        full = {
            "network": self.bandwidth_bytes_per_second,
            "inside": self.inside_bandwidth_bytes_per_second,
        }
        return full[link] / (1 + SHARING_LOSS * (flows - 1))

    @property
    def link(self) -> str:
        """The link between nodes in words, ``25 Gbit/s, 100 us``; empty of one node."""
        bandwidth = describe_bandwidth(self.bandwidth_bytes_per_second)
        return f"{bandwidth}, {describe_duration(self.latency_seconds)}" * (self.nodes > 1)

    @property
    def is_hierarchical(self) -> bool:
        """Whether something can be reduced inside a node before it is sent to others."""
        return self.nodes > 1 and self.ranks_per_node > 1


_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BANDWIDTH = re.compile(r"([0-9.]+(?:e[0-9]+)?)\s*([kKMGT]?)(bit|bps|B)(?:/s)?")
_DURATIONS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_DURATION = re.compile(r"([0-9.]+(?:e-?[0-9]+)?)\s*(ns|us|µs|ms|s)")


def parse_bandwidth(text: str) -> float:
    """Return the bytes per second of ``25Gbit``, ``200Mbit/s``, ``100Gbps``, ``1GB`` or ``1GB/s``.

    Prefixes are powers of 1000, as usual in networking.

    Raises:
        ValueError: it says something else.
    """
    value, (prefix, unit) = _read(
        _BANDWIDTH, text, "bandwidth; write it like 25Gbit, 200Mbit or 1GB"
    )
    return value * _PREFIXES[prefix] / (1 if unit == "B" else 8)


def parse_duration(text: str) -> float:
    """Seconds of ``100us``, ``2ms`` or ``0.5s``.

    Raises:
        ValueError: it says something else.
    """
    value, (unit,) = _read(_DURATION, text, "latency; write it like 100us or 2ms")
    return value * _DURATIONS[unit]


def describe_bandwidth(bytes_per_second: float) -> str:
    """Return a bandwidth in words, such as ``25 Gbit/s``."""
    bits = bytes_per_second * 8
    for prefix in ("T", "G", "M", "k"):
        if bits >= _PREFIXES[prefix]:
            return f"{bits / _PREFIXES[prefix]:.3g} {prefix}bit/s"
    return f"{bits:.3g} bit/s"


def describe_duration(seconds: float) -> str:
    """Return a duration in words, such as ``100 us``."""
    for unit in ("s", "ms"):
        if seconds >= _DURATIONS[unit]:
            return f"{seconds / _DURATIONS[unit]:.3g} {unit}"
    return f"{seconds / _DURATIONS['us']:.3g} us"


def _read(pattern: re.Pattern[str], text: str, what: str) -> tuple[float, list[str]]:
    """The number, which is positive, and the pattern's other groups."""
    found = pattern.fullmatch(text.strip())
    with suppress(ValueError):
        if found and 0 < float(found[1]) < math.inf:
            return float(found[1]), list(found.groups()[1:])
    raise ValueError(f"{text!r} is no {what}")


Way = Literal["off", "leaders", "shards"]
"""Ways of reducing: flat; one rank of each node between the nodes; or each rank with a share."""
TREE_BANDWIDTH = 0.92
# What NCCL takes a tree for, by the least bytes of the message: a share of what a tree can reach
# (its ``treeCorrectionFactor``, for the protocol of large messages; small ones wait for latency
# anyway). It decides by that and not by what a tree then reaches.
TREE_EXPECTED = (
    (128 * 2**20, 0.9), (64 * 2**20, 0.8), (16 * 2**20, 0.7), (8 * 2**20, 0.8), (4 * 2**20, 0.7),
    (2 * 2**20, 0.6), (128 * 2**10, 0.5), (0, 0.6),
)  # fmt: skip
# Where a core copies what a rank sends and what it receives, a ring over several ranks of a node
# has one for each: the rank that sends to the next node is not the one that receives. Ours;
# measured were 1.5 and 1.7 (reports/2026-11-simulator.md).
SPLIT = 1.6
# How steeply the reached bandwidth rises with the size of the message.
RISE = 0.6
# A conversion reads and writes GPU memory (900 GB/s on a V100), before sending and after.
CONVERTED_BYTES_PER_SECOND = 300e9
# The client sends no smaller parts.
SMALLEST_PART_BYTES = 512 * 1024


@dataclass(frozen=True)
class Phase:
    """One operation: a wait, then bytes over each node's link at no more than ``most``.

    Attributes:
        link: the resource that it shares with the other phases under way.
        seconds: from its start until the bytes flow.
        bytes: over the link in each direction.
        most: bytes per second that it reaches alone.
        flows: connections that the link sees; one between each pair of neighbours for a
            collective.
        weight: how many bytes of what the link carries each of them takes up.
    """

    link: Link
    seconds: float
    bytes: float
    most: float
    flows: int = 1
    weight: float = 1.0

    @property
    def alone_seconds(self) -> float:
        """Return how long the phase takes if nothing else uses the link."""
        return self.seconds + self.bytes / self.most


def reduction(cluster: Cluster, hierarchical: str, size_bytes: float) -> tuple[Phase, ...]:
    """The phases that sum ``size_bytes`` over all ranks; none if there is one rank.

    Args:
        hierarchical: ``off``, ``leaders`` or ``shards``; all mean the same to a cluster of one
            node or of one rank on each.

    Raises:
        ValueError: another value.
    """
    if hierarchical not in get_args(Way):
        raise ValueError(f"hierarchical is {hierarchical!r}; it must be off, leaders or shards")
    if cluster.world_size == 1:
        return ()
    if hierarchical == "off" or not cluster.is_hierarchical:
        return (_flat(cluster, size_bytes),)
    flows = cluster.ranks_per_node if hierarchical == "shards" else 1
    return chained(cluster, hierarchical, size_bytes, (_across(cluster, size_bytes, flows),))


def chained(
    cluster: Cluster, hierarchical: str, size_bytes: float, across: tuple[Phase, ...]
) -> tuple[Phase, ...]:
    """What ``leaders`` or ``shards`` do inside the nodes, before and after some phases between
    them.
    """
    ranks = cluster.ranks_per_node
    hops = (ranks - 1) * cluster.inside_latency_seconds
    if hierarchical == "leaders":
        around = inside(cluster, hops, size_bytes)
    else:
        around = inside(cluster, hops, size_bytes * (ranks - 1) / ranks)
        around = replace(around, most=around.most * cluster.shards_share)
    return (around, *across, around)


def parts(size_bytes: float, channels: int) -> int:
    """The number of parts in which a bucket of so many bytes is sent."""
    return max(1, min(channels, int(size_bytes // SMALLEST_PART_BYTES)))


def converted_seconds(size_bytes: float) -> float:
    """Time to convert a bucket to another precision and back."""
    return 2 * size_bytes / CONVERTED_BYTES_PER_SECOND


def _flat(cluster: Cluster, size_bytes: float) -> Phase:
    """One ring or tree over all ranks, which enters and leaves each node once."""
    world = cluster.world_size
    inside_hops = 2 * (world - cluster.nodes)
    volume = 2 * (world - 1) / world * size_bytes
    if cluster.nodes == 1:
        return inside(cluster, inside_hops * cluster.inside_latency_seconds, volume)
    tree_inside = 2 * (cluster.ranks_per_node - 1) * cluster.inside_latency_seconds
    most = min(reached(cluster, size_bytes), cluster.inside_bandwidth_bytes_per_second)
    ring, tree = _ring_and_tree(
        cluster, volume, most, inside_hops * cluster.inside_latency_seconds, tree_inside
    )
    if not cluster.is_nccl or cluster.ranks_per_node == 1:
        return _faster(ring, tree)
    if cluster.nodes == 2:
        tree = replace(tree, bytes=size_bytes)
        expected = next(share for least, share in TREE_EXPECTED if size_bytes >= least)
        if replace(tree, most=tree.most * expected).alone_seconds < ring.alone_seconds:
            return replace(tree, most=most)
    split = min(reached(cluster, size_bytes, SPLIT), cluster.inside_bandwidth_bytes_per_second)
    # Not where one flow fills the link: then it is the link that limits all of them.
    filling = cluster.bandwidth_bytes_per_second / cluster.flow_bytes_per_second
    ring = replace(ring, most=split, weight=1 / max(1.0, min(cluster.together, filling)))
    return ring if cluster.nodes == 2 else _faster(ring, tree)


def _across(cluster: Cluster, size_bytes: float, flows: int) -> Phase:
    """All-reduces between the nodes side by side, of one part of the bucket each."""
    volume = 2 * (cluster.nodes - 1) / cluster.nodes * size_bytes
    together = flows * reached(cluster, size_bytes / flows)
    most = min(cluster.capacity("network", flows), together)
    return replace(_faster(*_ring_and_tree(cluster, volume, most, 0.0, 0.0)), flows=flows)


def _ring_and_tree(
    cluster: Cluster, volume: float, most: float, ring_inside: float, tree_inside: float
) -> tuple[Phase, Phase]:
    """Both ways to send; the seconds inside the node are those of all its hops."""
    hop = cluster.latency_seconds
    ring_seconds = cluster.start_seconds + ring_inside + 2 * (cluster.nodes - 1) * hop
    ring = Phase("network", ring_seconds, volume, most)
    depth = math.ceil(math.log2(cluster.nodes))
    tree_seconds = cluster.start_seconds + tree_inside + 2 * depth * hop
    tree = Phase("network", tree_seconds, volume, most * TREE_BANDWIDTH)
    return ring, tree


def _faster(*phases: Phase) -> Phase:
    return min(phases, key=lambda phase: phase.alone_seconds)


def inside(cluster: Cluster, hops_seconds: float, volume: float) -> Phase:
    """Bytes over the link inside each node, after so many seconds of hops."""
    most = cluster.inside_bandwidth_bytes_per_second * cluster.flow_share
    return Phase("inside", cluster.start_seconds + hops_seconds, volume, most)


def reached(cluster: Cluster, message_bytes: float, cores: float = 1.0) -> float:
    """Return the bytes per second that one flow alone reaches between two nodes.

    Args:
        cores: how much more its cores copy than one core for both directions.
    """
    limit = min(
        cluster.bandwidth_bytes_per_second * cluster.flow_share,
        cluster.flow_bytes_per_second * cores,
    )
    half_bytes = cluster.half_seconds * cluster.bandwidth_bytes_per_second
    return limit / (1 + math.pow(half_bytes / max(message_bytes, 1.0), RISE))

"""How a bucket travels under an algorithm that does not just sum gradients up.

What is sent is what the client's algorithms send (``docs/algorithms.md``): chunks in a few bits to
the ranks that sum them and the sums to all (``chunks``), a change of weights in a few bits to two
neighbours in a ring (``ring``), or weights to one other rank (``pair``). Of a hierarchical exchange
only what crosses nodes is packed.

Packing is bound by memory. A V100's memory moves 900 GB/s, and the client's kernels reach 0.7 to
0.9 of a copy's rate (measured on an H200: ``reports/2026-11-algorithms.md``). On a CPU it takes
longer, by an unknown factor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from bagua_simulator.cluster import Cluster
from bagua_simulator.collectives import Phase, chained, inside, reached, reduction

Moment = Literal["ready", "begin", "end", "apart"]
Pattern = Literal["sum", "chunks", "ring", "pair"]
PACKED_BYTES_PER_SECOND = 0.8 * 900e9
RANGE_ELEMENTS, RANGE_BYTES = 4096, 8
"""So many numbers of a chunk share a minimum and a maximum, of so many bytes together."""
FULL_BITS = 32
RING_COPIES = 15.0
"""Bytes of memory moved for each byte of float32 weights in a ``ring``: four tensors are read for
the change, which is packed, then unpacked and added to three replicas, and one is copied."""


@dataclass(frozen=True)
class Sends:
    """What replicas send, and when.

    Attributes:
        when: what travels may leave. ``ready``: a bucket of gradients when it is full. ``begin``:
            weights, when the step begins. ``end``: weights, when all gradients are there.
            ``apart``: nothing that a step waits for.
        pattern: who gets what.
        bits: of a number that crosses nodes; 32 in ``sum`` and ``pair``.
        ways: of reducing inside nodes.
    """

    when: Moment = "ready"
    pattern: Pattern = "sum"
    bits: int = FULL_BITS
    ways: tuple[str, ...] = ("off", "leaders", "shards")

    @property
    def share(self) -> float:
        """What is left of each byte of float32, the bounds of the ranges included."""
        if self.bits == FULL_BITS:
            return 1.0
        return self.bits / FULL_BITS + RANGE_BYTES / (4 * RANGE_ELEMENTS)


SHIFT_ONE = "decentralized, shift_one"
ALGORITHMS: dict[str, Sends] = {
    "gradient_allreduce": Sends(),
    "bytegrad": Sends(pattern="chunks", bits=8),
    "qadam": Sends(pattern="chunks", bits=8),
    "decentralized": Sends("begin"),
    SHIFT_ONE: Sends("begin", "pair", ways=("off", "leaders")),
    "low_precision_decentralized": Sends("end", "ring", bits=8, ways=("off", "leaders")),
    "async": Sends("apart"),
}
"""Bagua's six with the client's default arguments, ``qadam`` after its warm-up, and the other way
of ``decentralized``."""


def exchange(
    cluster: Cluster, sends: Sends, hierarchical: str, size_bytes: float
) -> tuple[Phase, ...]:
    """The phases of one bucket of ``size_bytes`` of float32; none if there is one rank.

    Raises:
        ValueError: the algorithm does not work with this way of reducing.
    """
    if hierarchical not in sends.ways:
        raise ValueError(f"hierarchical is {hierarchical!r}; it must be {', '.join(sends.ways)}")
    if sends.pattern == "sum" or cluster.world_size == 1:
        return reduction(cluster, hierarchical, size_bytes)
    across = {"chunks": _chunks, "ring": _ring, "pair": _pair}[sends.pattern]
    if hierarchical == "off" or not cluster.is_hierarchical:
        return across(cluster, sends, size_bytes, cluster.ranks_per_node, cluster.world_size)
    if hierarchical == "leaders":
        found = across(cluster, sends, size_bytes, 1, cluster.nodes)
    else:
        part = size_bytes / cluster.ranks_per_node
        found = across(cluster, sends, part, cluster.ranks_per_node, cluster.nodes)
    return chained(cluster, hierarchical, size_bytes, found)


def _chunks(
    cluster: Cluster, sends: Sends, size_bytes: float, senders: int, ranks: int
) -> tuple[Phase, ...]:
    """Each of the ranks that take part sends a chunk to each other one, and its sum to all."""
    packed = size_bytes * sends.share
    packing = (size_bytes + packed) / PACKED_BYTES_PER_SECOND
    summing = (packed + 2 * size_bytes / ranks) / PACKED_BYTES_PER_SECOND
    gathered = (ranks - 1) / ranks * packed
    if cluster.nodes == 1:
        hops = (ranks - 1) * cluster.inside_latency_seconds
        scatter = inside(cluster, cluster.inside_latency_seconds, gathered)
        gather = inside(cluster, hops, gathered)
        return (_later(scatter, packing), _later(gather, summing + packing))
    is_flat = ranks == cluster.world_size
    # Of what a rank scatters, all that is for other nodes crosses its node's link. A ring that
    # gathers passes each link once.
    elsewhere = (ranks - ranks // cluster.nodes) / ranks
    scattered = senders * elsewhere * packed
    rings = 1 if is_flat else senders
    inside_hops = (ranks - cluster.nodes if is_flat else 0) * cluster.inside_latency_seconds
    scatter = _over(cluster, scattered, packed, senders)
    gather = _over(cluster, rings * gathered, packed, rings)
    hops = (cluster.nodes - 2) * cluster.latency_seconds + inside_hops
    return (_later(scatter, packing), _later(gather, summing + packing + hops))


def _ring(
    cluster: Cluster, sends: Sends, size_bytes: float, senders: int, ranks: int
) -> tuple[Phase, ...]:
    """Each of the ranks that take part sends its packed change to its neighbours in a ring."""
    packed = size_bytes * sends.share
    neighbours = min(2, ranks - 1)
    work = RING_COPIES * size_bytes / PACKED_BYTES_PER_SECOND
    if cluster.nodes == 1:
        found = inside(cluster, cluster.inside_latency_seconds, neighbours * packed)
        return (_later(found, work),)
    # In a flat ring only the first and the last rank of a node have a neighbour elsewhere.
    found = _over(cluster, neighbours * packed, packed, 1)
    return (_later(found, work),)


def _pair(
    cluster: Cluster, sends: Sends, size_bytes: float, senders: int, ranks: int
) -> tuple[Phase, ...]:
    """Each of the ranks that take part sends all it has to one of the other half."""
    if cluster.nodes == 1:
        return (inside(cluster, cluster.inside_latency_seconds, size_bytes),)
    return (_over(cluster, senders * size_bytes, size_bytes, senders),)


def _over(cluster: Cluster, volume: float, message_bytes: float, senders: int) -> Phase:
    """Bytes over each node's link one hop far, by so many of its ranks, each with a message of
    this size to send."""
    together = senders * reached(cluster, message_bytes)
    most = min(cluster.capacity("network", senders), together)
    seconds = cluster.start_seconds + cluster.latency_seconds
    return Phase("network", seconds, volume, most, flows=senders)


def _later(phase: Phase, seconds: float) -> Phase:
    return replace(phase, seconds=phase.seconds + seconds)

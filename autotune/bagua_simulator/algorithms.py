"""What each way to train a model in parallel would take on a cluster at its best setting, and how a
bucket travels under each.

What is sent is what the client's algorithms send (``docs/algorithms.md``): chunks in a few bits to
the ranks that sum them and the sums to all (``chunks``), a change of weights in a few bits to two
neighbours in a ring (``ring``), or weights to one other rank (``pair``). Of a hierarchical exchange
only what crosses nodes is packed.

Packing is bound by memory. A V100's memory moves 900 GB/s, and the client's kernels reach 0.7 to
0.9 of a copy's rate (measured on an H200: ``reports/2026-11-algorithms.md``). On a CPU it takes
longer, by an unknown factor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from typing import Literal

from bagua_simulator.cluster import Cluster, Phase, chained, inside, parts, reached, reduction
from bagua_simulator.sharded import BACKWARD_SHARE, ShardedSimulator, Unit
from bagua_simulator.simulator import Layouts, Simulator, channels_of
from bagua_simulator.step import Message, Step
from bagua_simulator.workload import Workload
from bagua_wire.configuration import Configuration, Value

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
        when: gradients when they are ``ready``, or weights (see :class:`Replicas`).
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


ROUND_PAUSE_SECONDS = 0.5
"""Of ``async``: from the end of a round of averaging to the beginning of the next
(``sync_interval_ms``)."""


class Replicas:
    """The steps of a job under one algorithm that keeps replicas together.

    Gradients travel as they become ready. Weights travel when the first bucket is full, and the
    step ends when they have arrived (``begin``); or when the optimizer has stepped (``end``); or
    beside the steps (``apart``).

    Args:
        simulator: the job, whose gradients are summed up.
        sends: what travels instead.
    """

    def __init__(self, simulator: Simulator, sends: Sends) -> None:
        self.simulator = simulator
        self.sends = sends
        self._layouts = Layouts(simulator.workload.tensors)

    def step_seconds(self, configuration: Mapping[str, Value]) -> float:
        """The length of an undisturbed step, the same on all ranks.

        Args:
            configuration: as ``Simulator`` takes it, without another precision on the wire.

        Raises:
            ValueError: a knob has an unknown value, or one that the algorithm does not work with.
        """
        if self.sends == Sends():
            return self.simulator.step_seconds(configuration)
        if self.sends.when == "apart":
            return self._apart_seconds()
        if configuration.get("wire_precision", "as_is") != "as_is":
            raise ValueError("only gradients that are summed up travel at another precision")
        workload, cluster = self.simulator.workload, self.simulator.cluster
        channels, messages = channels_of(configuration), []
        way = str(configuration.get("hierarchical", "off"))
        for ready_seconds, size_bytes in self._travelling(configuration):
            count = parts(size_bytes, channels)
            phases = exchange(cluster, self.sends, way, size_bytes / count)
            launch_seconds = self.simulator.launch_seconds * count * len(phases)
            messages.append(Message(ready_seconds, launch_seconds, (phases,) * count))
        step = Step(
            messages, workload.ready_seconds[-1], channels, cluster, self.simulator.contention
        )
        return workload.forward_seconds + step.run().end_seconds

    def _travelling(self, configuration: Mapping[str, Value]) -> list[tuple[float, float]]:
        """What travels: when it may leave, since the beginning of the backward pass, and bytes."""
        times = self.simulator.workload.ready_seconds
        buckets = self._layouts.cut(configuration)
        if self.sends.when == "begin":
            # All weights of a kind at once, when the first bucket is full.
            whole: dict[str, float] = {}
            for tensor in self.simulator.workload.tensors:
                whole[tensor.group] = whole.get(tensor.group, 0.0) + tensor.bytes
            return [(times[buckets[0].last], size_bytes) for size_bytes in whole.values()]
        is_late = self.sends.when == "end"
        return [(times[-1] if is_late else times[b.last], float(b.bytes)) for b in buckets]

    def _apart_seconds(self) -> float:
        """No step waits for a round of averaging, but computing is slower beside it."""
        workload = self.simulator.workload
        size_bytes = float(sum(tensor.bytes for tensor in workload.tensors))
        phases = exchange(self.simulator.cluster, self.sends, "off", size_bytes)
        round_seconds = sum(phase.alone_seconds for phase in phases)
        share = round_seconds / (round_seconds + ROUND_PAUSE_SECONDS)
        return workload.compute_seconds * (1 + self.simulator.contention * share)


DEFAULT = "DDP, default"
SHARDED = {"fully_shard": "", "fully_shard, quantized": "quantized"}
"""The sharded ways, and the algorithm of each."""
WAYS = (DEFAULT, *ALGORITHMS, *SHARDED)
LOSSLESS = (DEFAULT, "gradient_allreduce")
"""Those under which the numbers of a training stay as they are."""
EQUAL = (*LOSSLESS, "bytegrad", "qadam")
"""Those that keep whole replicas, all of them equal."""
SIZES_BYTES = tuple(2**power for power in range(16, 31))
CHANNELS = (1, 2, 4)
"""More channels, and sizes between these, would take ten times as long on a large model."""
MERGED_UNITS = (2, 4)
"""So many units of average size travel as one."""
_BLOCK = re.compile(r".*?\.\d+(?=\.|$)")


@dataclass(frozen=True)
class Outcome:
    """A way to train, at its best setting.

    Attributes:
        way: one of ``WAYS``.
        compute_seconds: of a step without communication.
    """

    cluster: Cluster
    way: str
    configuration: Configuration
    step_seconds: float
    compute_seconds: float

    @property
    def exposed_share(self) -> float:
        """What communication adds to a step's computing, as a share of the step."""
        return max(0.0, 1 - self.compute_seconds / self.step_seconds)


def compare(simulator: Simulator, ways: Iterable[str] = WAYS) -> list[Outcome]:
    """One outcome for each way, in their order.

    Raises:
        KeyError: no such way.
    """
    found: list[Outcome] = []
    alike: dict[Sends, Outcome] = {}
    for way in ways:
        # Two algorithms that send the same take as long.
        sends = ALGORITHMS.get(way)
        known = alike.get(sends) if sends else None
        outcome = replace(known, way=way) if known else _best(simulator, way)
        if sends:
            alike[sends] = outcome
        found.append(outcome)
    return found


def fastest(outcomes: Sequence[Outcome], ways: Sequence[str] = WAYS) -> Outcome:
    """The outcome with the shortest step, of some ways; of equal ones the first."""
    among = [outcome for outcome in outcomes if outcome.way in ways]
    return min(among, key=lambda outcome: outcome.step_seconds)


def sharded(simulator: Simulator) -> ShardedSimulator:
    """The same model, sharded over all ranks, a unit for each block.

    A block is what tensors' names share up to their first number; what has none is the root's. Each
    computes for its share of the backward pass. A ring over all ranks passes each node's link once,
    so that link counts, and inside a single node its own.
    """
    cluster = simulator.cluster
    hops = (cluster.nodes - 1) * cluster.latency_seconds
    hops += (cluster.world_size - cluster.nodes) * cluster.inside_latency_seconds
    link = replace(cluster, latency_seconds=hops)
    if cluster.nodes == 1:
        inside = cluster.inside_bandwidth_bytes_per_second
        link = replace(link, bandwidth_bytes_per_second=inside, flow_bytes_per_second=inf)
    return ShardedSimulator(units_of(simulator.workload), link)


def units_of(workload: Workload) -> list[Unit]:
    """The model's units, the root's first; together they compute for as long as the model."""
    elements: dict[str, int] = {}
    seconds: dict[str, float] = {}
    before = 0.0
    for tensor, ready in zip(workload.tensors, workload.ready_seconds, strict=True):
        block = _BLOCK.match(tensor.name)
        name = block.group() if block else ""
        elements[name] = elements.get(name, 0) + tensor.elements
        seconds[name] = seconds.get(name, 0.0) + ready - before
        before = ready
    # The backward pass begins with the model's end.
    blocks = [name for name in reversed(elements) if name]
    names = ["", *blocks] if "" in elements else blocks
    total = sum(seconds.values())
    whole = workload.compute_seconds / (1 + BACKWARD_SHARE)
    shares = {n: seconds[n] / total if total else 1 / len(names) for n in names}
    return [
        Unit(name or "root", elements[name], shares[name] * whole, "blocks" if name else "root")
        for name in names
    ]


def _best(simulator: Simulator, way: str) -> Outcome:
    compute_seconds = simulator.workload.compute_seconds
    if way in SHARDED:
        model = sharded(simulator)
        tried = _sharded_settings(model, SHARDED[way])
        seconds = {each: model.step_seconds(each) for each in tried}
    elif way == DEFAULT:
        seconds = {simulator.default: simulator.step_seconds(simulator.default)}
    else:
        sends = ALGORITHMS[way]
        replicas = Replicas(simulator, sends)
        tried = _replicated_settings(simulator, sends)
        seconds = {each: replicas.step_seconds(each) for each in tried}
    # Of equal ones the first, which is the default or near it.
    best = min(seconds, key=lambda each: seconds[each])
    return Outcome(simulator.cluster, way, best, seconds[best], compute_seconds)


def _replicated_settings(simulator: Simulator, sends: Sends) -> list[Configuration]:
    """The settings that change an algorithm's cost, the usual ones first."""
    default = simulator.default
    if sends.when == "apart":
        return [default]
    usual = default["bucket_bytes"]
    sizes = (usual, *SIZES_BYTES) if sends.when != "begin" else (usual,)
    ways = [way for way in simulator.ways if way in sends.ways]
    return [
        Configuration(default, bucket_bytes=size, hierarchical=hierarchical, channels=channels)
        for channels, hierarchical, size in product(CHANNELS, ways, sizes)
    ]


def _sharded_settings(model: ShardedSimulator, algorithm: str) -> list[Configuration]:
    """Settings that take no memory to speak of: no unit stays gathered."""
    average = sum(tensor.bytes for tensor in model.tensors) // len(model.tensors)
    sizes = [model.default["bucket_bytes"], *(count * average for count in MERGED_UNITS)]
    extra = {"algorithm": algorithm} if algorithm else {}
    return [
        Configuration(
            model.default, bucket_bytes=size, channels=channels, prefetch=prefetch,
            scatter_group=group, scatter_buffers=buffers, **extra,
        )
        for channels, size, prefetch, group, buffers in product(
            CHANNELS, sizes, (0, 2), ("shared", "own"), (1, 2)
        )
    ]  # fmt: skip

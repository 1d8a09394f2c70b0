"""What each way to train a model in parallel would take on a cluster, at its best setting."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf

from bagua_simulator.algorithms.exchanges import ALGORITHMS, Sends, exchange
from bagua_simulator.cluster import Cluster
from bagua_simulator.collectives import parts
from bagua_simulator.layout import Layouts
from bagua_simulator.sharded import BACKWARD_SHARE, ShardedSimulator, Unit
from bagua_simulator.simulator import Simulator
from bagua_simulator.step import Message, Step
from bagua_simulator.workload import Workload
from bagua_wire.configuration import Configuration, Value

# A workload on a cluster under each algorithm that keeps replicas together.
#
# Gradients travel as they become ready. Weights travel when the first bucket is full, and the step
# ends when they have arrived (``begin``); or when the optimizer has stepped (``end``); or beside
# the steps (``apart``).

ROUND_PAUSE_SECONDS = 0.5
"""Of ``async``: from the end of a round of averaging to the beginning of the next
(``sync_interval_ms``)."""


class Replicas:
    """The steps of a job under one algorithm.

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
        channels = configuration.get("channels", 1)
        if not isinstance(channels, int) or channels < 1:
            raise ValueError(f"channels is {channels!r}; it must be a positive number")
        messages = [
            self._message(ready_seconds, size_bytes, configuration, channels)
            for ready_seconds, size_bytes in self._travelling(configuration)
        ]
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

    def _message(
        self,
        ready_seconds: float,
        size_bytes: float,
        configuration: Mapping[str, Value],
        channels: int,
    ) -> Message:
        count = parts(size_bytes, channels)
        way = str(configuration.get("hierarchical", "off"))
        phases = exchange(self.simulator.cluster, self.sends, way, size_bytes / count)
        launch_seconds = self.simulator.launch_seconds * count * len(phases)
        return Message(ready_seconds, launch_seconds, (phases,) * count)

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

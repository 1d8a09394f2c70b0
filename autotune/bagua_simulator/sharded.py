"""A sharded model (``fully_shard``) that trains, simulated: the step time of every configuration.

Written independently of the search's cost model, for which it is the ground truth. Computing, one
queue of gathers and one of reductions run side by side; gathers and reductions share the link, none
gets more than a single connection does, and on one process group only one of the two is under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bagua_simulator.cluster import Cluster
from bagua_simulator.simulator import PRECISIONS
from bagua_wire.configuration import Configuration, Value
from bagua_wire.cutting import Cutter, Cutting, Tensor
from bagua_wire.knobs import DEFERRED_KNOB, KEPT_OVER_KNOB, domains
from bagua_wire.profile import BucketTiming, GatherTiming, Profile

BACKWARD_SHARE = 2.0
"""What a unit computes in the backward pass, over what it does in the forward pass."""
LATENCY_SECONDS = 60e-6
"""Until all ranks have begun a collective."""
STRIPE_LOSS = 0.3
"""Of the rate that another connection adds, for each one that there is already."""
SPREAD = 0.01
MICRO_BATCH_KNOBS = (KEPT_OVER_KNOB, DEFERRED_KNOB)
REDUCED_BYTES, GATHERED_BYTES = 4, 2
"""Of an element: parameters travel in 16 bits, gradients in 32."""
EIGHT_BITS: dict[object, tuple[float, float]] = {
    "quantized": (0.51, 0.26),
    "quantized_weights": (0.51, 1.0),
}
EIGHT_BITS["quantized_gradients"] = (1.0, 0.26)
"""The part that is left of what is gathered and of what is reduced."""


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together.

    Attributes:
        forward_seconds: of computing with them; the backward pass takes ``BACKWARD_SHARE`` of it.
        recomputing_seconds: by which its backward pass is longer.
    """

    name: str
    elements: int
    forward_seconds: float
    group: str = "blocks"
    recomputing_seconds: float = 0.0

    @property
    def backward_seconds(self) -> float:
        return self.forward_seconds * BACKWARD_SHARE + self.recomputing_seconds


@dataclass
class _Collective:
    """A gather or a reduction that waits for its turn, or is under way."""

    part: int
    left_seconds: float
    left_bytes: float
    size_bytes: int
    started: float = -1.0
    ended: float = -1.0


@dataclass
class _Trace:
    gathers: list[_Collective] = field(default_factory=list)
    reductions: list[_Collective] = field(default_factory=list)
    end_seconds: float = 0.0


class ShardedSimulator:
    """The steps of a sharded model on one cluster; as ``Simulator`` has them.

    Args:
        units: in the order of the model, the root's first; it is gathered once in a pass.
        micro_batches: of a step; the gradients of each are reduced.
    """

    def __init__(self, units: Sequence[Unit], cluster: Cluster, micro_batches: int = 1) -> None:
        self.units = units
        self.cluster = cluster
        self.micro_batches = micro_batches
        self.tensors = [
            Tensor(
                name=unit.name,
                elements=unit.elements,
                bytes=unit.elements * REDUCED_BYTES,
                dtype="torch.float32",
                group=unit.group,
            )
            for unit in reversed(units)
        ]
        self._cutter = Cutter(self.tensors)
        self._known: dict[tuple[tuple[str, Value], ...], float] = {}

    @property
    def space(self) -> dict[str, dict[str, Any]]:
        """The knobs that a job registers with the service, by name."""
        most, sizes = len(self.units) - 1, [tensor.bytes for tensor in self.tensors]
        few: dict[str, Sequence[Value]] = {
            "channels": (1, 2, 4, 8),
            "kept_units": sorted({0, round(most / 4), round(most / 2), most}),
            "prefetch": (0, 2),
            "scatter_group": ("shared", "own"),
            "scatter_buffers": (1, 2),
            **(dict.fromkeys(MICRO_BATCH_KNOBS, ("off", "on")) if self.micro_batches > 1 else {}),
        }
        return domains((min(sizes), sum(sizes)), few, False)

    @property
    def default(self) -> Configuration:
        """The default: each unit by itself, as torch has it."""
        low = min(tensor.bytes for tensor in self.tensors)
        return Configuration(
            bucket_bytes=low,
            channels=1,
            kept_units=0,
            prefetch=0,
            scatter_group="shared",
            scatter_buffers=1,
            **(dict.fromkeys(MICRO_BATCH_KNOBS, "off") if self.micro_batches > 1 else {}),
        )

    def step_seconds(self, configuration: Mapping[str, Value]) -> float:
        """The length of an undisturbed step; missing knobs are not in use."""
        key = tuple(sorted(configuration.items()))
        if key not in self._known:
            self._known[key] = self._run(configuration).end_seconds
        return self._known[key]

    def computing_seconds(self, configuration: Mapping[str, Value]) -> float:
        """Of such a step, without what it waits for parameters."""
        return sum(unit.forward_seconds + unit.backward_seconds for unit in self.units)

    def profile(
        self,
        configuration: Mapping[str, Value],
        step: int = 0,
        generator: np.random.Generator | None = None,
        noise: float = 0.0,
    ) -> Profile:
        """Rank 0's profile of a step, all of it longer or shorter by the same noise."""
        factor = float(generator.lognormal(0.0, noise)) if generator and noise else 1.0
        trace, parts = self._run(configuration), self.parts(configuration)
        last = len(self.units) - 1
        ready = [0.0] * len(self.units)
        for each in trace.reductions:
            for place in parts[each.part]:
                ready[last - place] = each.started * factor
        return Profile(
            step=step,
            step_seconds=trace.end_seconds * factor,
            ready_seconds=tuple(ready),
            buckets=tuple(
                BucketTiming(
                    bytes=each.size_bytes,
                    started_seconds=each.started * factor,
                    ended_seconds=each.ended * factor,
                )
                for each in trace.reductions
            ),
            gathers=tuple(
                GatherTiming(
                    tensor=last - parts[each.part][0],
                    bytes=each.size_bytes,
                    started_seconds=each.started * factor,
                    ended_seconds=each.ended * factor,
                )
                for each in trace.gathers
            ),
        )

    def observe(
        self,
        configuration: Mapping[str, Value],
        generator: np.random.Generator,
        noise: float = 0.05,
        straggler_probability: float = 0.0,
    ) -> tuple[float, ...]:
        """Seconds of one step by rank, as the ranks report them."""
        seconds = self.step_seconds(configuration) * generator.lognormal(0.0, noise)
        if generator.random() < straggler_probability:
            seconds *= 1.5
        shares = 1 - SPREAD * generator.random(self.cluster.world_size)
        return tuple((seconds * shares / shares.max()).tolist())

    def parts(self, configuration: Mapping[str, Value]) -> list[tuple[int, ...]]:
        """The units that travel as one, in the order of the model."""
        last = len(self.units) - 1
        cut = self._cutter.cut(Cutting.of(Configuration(configuration)))
        return sorted(tuple(sorted(last - place for place in b.positions)) for b in cut)

    def _run(self, configuration: Mapping[str, Value]) -> _Trace:
        return _Step(self, configuration, self.parts(configuration)).run()


class _Step:
    """One step, event by event."""

    def __init__(
        self,
        simulator: ShardedSimulator,
        configuration: Mapping[str, Value],
        parts: Sequence[tuple[int, ...]],
    ) -> None:
        units, cluster = simulator.units, simulator.cluster
        count = len(parts)
        elements = [sum(units[place].elements for place in part) for part in parts]
        kept_from = len(units) - _number(configuration, "kept_units", 0)
        is_kept = [part == 0 or min(parts[part]) >= kept_from for part in range(count)]
        forward = [*range(count)]
        backward = forward[::-1]
        self._tasks = [
            (part, sum(units[place].forward_seconds for place in parts[part]), False)
            for part in forward
        ]
        self._tasks += [
            (part, sum(units[place].backward_seconds for place in parts[part]), True)
            for part in backward
        ]
        self._share = (cluster.world_size - 1) / cluster.world_size
        narrow = PRECISIONS[str(configuration.get("wire_precision", "as_is"))]
        gathers, reduces = EIGHT_BITS.get(configuration.get("algorithm"), (1.0, narrow))
        self._narrow = min(reduces, narrow) * self._share
        gathered = [elements[p] * GATHERED_BYTES for p in forward]
        self._needs: list[_Collective | None] = [
            _collective(p, gathered[p], gathers * self._share) for p in forward
        ]
        self._needs += [
            None if is_kept[p] else _collective(p, gathered[p], gathers * self._share)
            for p in backward
        ]
        stays = configuration.get(KEPT_OVER_KNOB) == "on"
        tasks, first = self._tasks, self._needs
        before_last = len(tasks) * (simulator.micro_batches - 1)
        self._reduces_from = before_last if configuration.get(DEFERRED_KNOB) == "on" else 0
        self._tasks = tasks * simulator.micro_batches
        for _ in range(simulator.micro_batches - 1):
            self._needs = self._needs + [
                None if each is None or (stays and is_kept[each.part]) else replace(each)
                for each in first
            ]
        self._to_gather = deque(
            (place, each) for place, each in enumerate(self._needs) if each is not None
        )
        self._reduced = [elements[p] * REDUCED_BYTES for p in forward]
        self._depth = max(_number(configuration, "prefetch", 0), 1)
        self._buffers = _number(configuration, "scatter_buffers", 1)
        channels = _number(configuration, "channels", 1)
        self._is_shared = channels > 1 or configuration.get("scatter_group") != "own"
        useful = sum((1 - STRIPE_LOSS) ** channel for channel in range(channels))
        self._link = cluster.bandwidth_bytes_per_second
        self._flow = useful * min(cluster.flow_bytes_per_second, self._link)
        self._latency = LATENCY_SECONDS + channels * 20e-6 + cluster.latency_seconds
        self._trace = _Trace()

    def run(self) -> _Trace:
        """All of it."""
        now, task, left = 0.0, 0, self._tasks[0][1]
        gathering: deque[_Collective] = deque()
        reducing: deque[_Collective] = deque()
        order: list[_Collective] = []
        while task < len(self._tasks) or reducing:
            while self._to_gather and self._to_gather[0][0] <= task + self._depth:
                each = self._to_gather.popleft()[1]
                each.left_seconds = self._latency
                gathering.append(each)
                order.append(each)
            travelling = [lane[0] for lane in (gathering, reducing) if lane]
            if self._is_shared and len(travelling) > 1:
                travelling = [min(travelling, key=order.index)]
            for each in travelling:
                each.started = now if each.started < 0 else each.started
            rate = min(self._flow, self._link / max(len(travelling), 1))
            waits = [_left(each, rate) for each in travelling]
            computes = task < len(self._tasks) and self._may_compute(task, reducing)
            if computes:
                waits.append(left)
            passed = max(min(waits), 1e-9)
            now += passed
            for each in travelling:
                _travel(each, rate, passed)
                if _left(each, rate) <= 1e-9:
                    each.ended = now
                    (gathering if gathering and gathering[0] is each else reducing).popleft()
            if computes:
                left -= passed
                if left <= 1e-9:
                    part, _, is_backward = self._tasks[task]
                    if is_backward and task >= self._reduces_from:
                        size = self._reduced[part]
                        each = _collective(part, size, self._narrow)
                        each.left_seconds = self._latency
                        reducing.append(each)
                        order.append(each)
                        self._trace.reductions.append(each)
                    task += 1
                    left = self._tasks[task][1] if task < len(self._tasks) else 0.0
        self._trace.gathers = [each for each in self._needs if each is not None]
        self._trace.end_seconds = now
        return self._trace

    def _may_compute(self, task: int, reducing: Sequence[_Collective]) -> bool:
        needed = self._needs[task]
        is_there = needed is None or needed.ended >= 0
        return is_there and (not self._tasks[task][2] or len(reducing) <= self._buffers)


def _number(configuration: Mapping[str, Value], knob: str, usual: int) -> int:
    value = configuration.get(knob, usual)
    if not isinstance(value, int):
        raise ValueError(f"{knob} is {value!r}; it must be a number")
    return value


def _collective(part: int, size_bytes: int, share: float) -> _Collective:
    return _Collective(part, 0.0, size_bytes * share, size_bytes)


def _left(each: _Collective, rate: float) -> float:
    return each.left_seconds + each.left_bytes / rate


def _travel(each: _Collective, rate: float, passed: float) -> None:
    waited = min(each.left_seconds, passed)
    each.left_seconds -= waited
    each.left_bytes = max(each.left_bytes - rate * (passed - waited), 0.0)

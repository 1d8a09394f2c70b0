"""Blocks that recompute their activations, simulated: what their steps take, and what memory.

Written independently of the search's cost model and of what the client predicts, for which it is
the ground truth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from bagua_simulator.cluster import Cluster
from bagua_simulator.sharded import GATHERED_BYTES, REDUCED_BYTES, ShardedSimulator, Unit
from bagua_simulator.simulator import Simulator
from bagua_simulator.workload import Workload
from bagua_wire.configuration import Configuration, Value
from bagua_wire.cutting import Tensor
from bagua_wire.knobs import ALL_BLOCKS, RECOMPUTED_KNOB
from bagua_wire.profile import Profile

LARGEST_SHARE = 0.9
"""Of a device's memory, that may be used."""
SHARES_KEPT = (0.25, 0.5, 0.75, 1.0)
"""Of the blocks that fit, those that a job offers to keep."""


@dataclass(frozen=True)
class Block:
    """A block whose activations the training recomputes.

    Attributes:
        seconds: that recomputing them takes.
        kept_bytes: of memory, where they are kept.
    """

    seconds: float
    kept_bytes: float


@dataclass(frozen=True)
class Room:
    """The memory of a rank's device.

    Attributes:
        peak_bytes: by default, with all blocks recomputed.
        device_bytes: what there is.
    """

    peak_bytes: float
    device_bytes: float

    @property
    def limit_bytes(self) -> float:
        """What may be used."""
        return LARGEST_SHARE * self.device_bytes


class RecomputingSimulator:
    """The steps of a training whose blocks recompute their activations; as ``Simulator`` has them.

    Args:
        made: of the seconds that recomputing each block takes, 0 where it keeps its activations:
            the training's steps.
        blocks: in the order of the model. The last ones are the first to keep theirs, and those of
            the very last are there anyway when the backward pass begins.
        room: what there is for them; None: enough.
    """

    def __init__(
        self,
        made: Callable[[Sequence[float]], Simulator | ShardedSimulator],
        blocks: Sequence[Block],
        room: Room | None = None,
    ) -> None:
        self.blocks, self.room = blocks, room
        seconds = [block.seconds for block in blocks]
        self._with = cache(lambda count: made([*seconds[:count], *[0.0] * (len(blocks) - count)]))

    @property
    def _default(self) -> Simulator | ShardedSimulator:
        return self._with(len(self.blocks))

    @property
    def cluster(self) -> Cluster:
        return self._default.cluster

    @property
    def tensors(self) -> Sequence[Tensor]:
        return self._default.tensors

    @property
    def space(self) -> dict[str, dict[str, Any]]:
        """The knobs that a job registers with the service, by name."""
        total = len(self.blocks)
        counts = range(total + 1)
        least = next(each for each in counts if self._room_for(self._kept_bytes(each)))
        values = [total, *(round(total - (total - least) * share) for share in SHARES_KEPT)]
        own = {"type": "categorical", "values": list(dict.fromkeys(values))}
        return {**(self._default.space if self._communicates else {}), RECOMPUTED_KNOB: own}

    @property
    def default(self) -> Configuration:
        """All blocks recomputed, and the rest as it is without that."""
        others = self._default.default if self._communicates else {}
        return Configuration({**others, RECOMPUTED_KNOB: len(self.blocks)})

    @property
    def _communicates(self) -> bool:
        return self.cluster.world_size > 1

    def step_seconds(self, configuration: Mapping[str, Value]) -> float:
        """The length of an undisturbed step; missing knobs are not in use."""
        return self._of(configuration).step_seconds(_without_own(configuration))

    def computing_seconds(self, configuration: Mapping[str, Value]) -> float:
        """Of such a step, without what it waits for communication."""
        return self._of(configuration).computing_seconds(_without_own(configuration))

    def profile(
        self,
        configuration: Mapping[str, Value],
        step: int = 0,
        generator: np.random.Generator | None = None,
        noise: float = 0.0,
    ) -> Profile:
        """Rank 0's profile of a step."""
        own = self._of(configuration)
        return own.profile(_without_own(configuration), step, generator, noise)

    def observe(
        self,
        configuration: Mapping[str, Value],
        generator: np.random.Generator,
        noise: float = 0.05,
        straggler_probability: float = 0.03,
    ) -> tuple[float, ...]:
        """Seconds of one step by rank, as the ranks report them."""
        own = self._of(configuration)
        return own.observe(_without_own(configuration), generator, noise, straggler_probability)

    def peak_bytes(self, configuration: Mapping[str, Value]) -> float:
        """What a step takes of a rank's memory at its peak."""
        if self.room is None:
            raise ValueError("nothing is said of the memory that the training takes")
        kept_bytes = self._kept_bytes(self._count(configuration))
        of_units = self._units_bytes(configuration) - self._units_bytes(self.default)
        return self.room.peak_bytes + kept_bytes + of_units

    def fits(self, configuration: Mapping[str, Value], proven_bytes: float = 0.0) -> bool:
        """Whether a rank tries it: it must also fit if what it takes beyond all that was measured
        were twice as much.

        Args:
            proven_bytes: the highest peak that was measured.
        """
        if (room := self.room) is None:
            return True
        peak_bytes = self.peak_bytes(configuration)
        twice_bytes = 2 * peak_bytes - max(proven_bytes, room.peak_bytes)
        may_be_used = peak_bytes <= room.limit_bytes and twice_bytes <= room.device_bytes
        return peak_bytes <= room.peak_bytes or may_be_used

    def _of(self, configuration: Mapping[str, Value]) -> Simulator | ShardedSimulator:
        return self._with(self._count(configuration))

    def _count(self, configuration: Mapping[str, Value]) -> int:
        total = len(self.blocks)
        count = configuration.get(RECOMPUTED_KNOB, ALL_BLOCKS)
        if not isinstance(count, int) or not ALL_BLOCKS <= count <= total:
            raise ValueError(f"{RECOMPUTED_KNOB} is {count!r}; the training recomputes {total}")
        return total if count == ALL_BLOCKS else count

    def _kept_bytes(self, count: int) -> float:
        """Of the blocks beyond the first ``count``, without the last."""
        return sum(block.kept_bytes for block in self.blocks[count:-1])

    def _room_for(self, kept_bytes: float) -> bool:
        room = self.room
        return room is None or not kept_bytes or room.peak_bytes + kept_bytes <= room.limit_bytes

    def _units_bytes(self, configuration: Mapping[str, Value]) -> float:
        """What a sharded model's units take: those that stay gathered, are gathered ahead, or whose
        gradients are under way."""
        own = self._default
        if not isinstance(own, ShardedSimulator):
            return 0.0
        kept, ahead, buffers = (
            int(str(configuration.get(knob, usual)))
            for knob, usual in (("kept_units", 0), ("prefetch", 0), ("scatter_buffers", 1))
        )
        parts = own.parts(configuration)
        largest = max(sum(own.units[place].elements for place in part) for part in parts)
        gathered = sum(unit.elements for unit in own.units[len(own.units) - kept :])
        gathered += largest * (1 + max(ahead, 1))
        return gathered * GATHERED_BYTES + largest * buffers * REDUCED_BYTES


def replicated(workload: Workload, cluster: Cluster) -> Callable[[Sequence[float]], Simulator]:
    """For :class:`RecomputingSimulator`: a model of which each rank has all."""
    return lambda seconds: Simulator(workload.recomputing(seconds), cluster)


def sharded(
    units: Sequence[Unit], cluster: Cluster
) -> Callable[[Sequence[float]], ShardedSimulator]:
    """For :class:`RecomputingSimulator`: a model each of whose units is a block but the first."""

    def made(seconds: Sequence[float]) -> ShardedSimulator:
        blocks = zip(units[1:], seconds, strict=True)
        changed = [replace(unit, recomputing_seconds=each) for unit, each in blocks]
        return ShardedSimulator([units[0], *changed], cluster)

    return made


def _without_own(configuration: Mapping[str, Value]) -> dict[str, Value]:
    return {knob: value for knob, value in configuration.items() if knob != RECOMPUTED_KNOB}

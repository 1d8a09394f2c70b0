"""How much more of a device's memory a configuration of a sharded model needs than the default: for
what it keeps, buffers and copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bagua_client.algorithms import Algorithm
from bagua_client.configuration import Configuration
from bagua_client.layout import Layout
from bagua_client.torch_private.sharded import Unit
from bagua_client.tunable.memory import DeviceMemory, MeasuredMemory
from bagua_client.tunable.recomputation import Recomputation

BYTES_OF_16_BITS = 2

Parts = Sequence[Sequence[int]]


def kept_units(units: Sequence[Unit], count: int) -> list[Unit]:
    """The units that stay gathered: the last ``count`` of those that otherwise would not."""
    eligible = [unit for unit in units if unit.is_gathered_twice]
    return eligible[max(len(eligible) - count, 0) :] if count else []


def extra_bytes(
    units: Sequence[Unit],
    configuration: Configuration,
    parts: Parts,
    algorithm: Algorithm,
    node_ranks: int = 1,
) -> int:
    """So much more than with all units by themselves the configuration holds at its peak.

    What is kept stays gathered in its own dtype, or spread over a node's ranks; what is gathered
    ahead adds the largest unit each; each further scatter buffer adds the largest unit's gradients.
    A merged unit is there twice, as it travels and as it is used. An algorithm may keep something
    for each element. What is reduced in the last micro-batch only is there as a whole until then.

    Args:
        units: of the model.
        parts: the places of the units that communicate as one.
        algorithm: that the configuration names.
        node_ranks: on each node.
    """
    whole = kept_units(units, configuration.kept_units)
    kept: int = sum(unit.elements * unit.dtypes[0].itemsize for unit in whole)
    if configuration.node_copy == "on":
        others = [unit for unit in kept_units(units, len(units)) if unit not in whole]
        kept += sum(unit.elements * unit.dtypes[0].itemsize for unit in others) // node_ranks
    sizes: list[list[int]] = [
        [unit.elements * dtype.itemsize for dtype in unit.dtypes] for unit in units
    ]
    gathered, reduced = (
        max(sum(sizes[place][which] for place in part) for part in parts) for which in range(2)
    )
    alone = sum(max(each) for each in zip(*sizes, strict=True))
    merged = 2 * (gathered + reduced - alone)
    ahead = max(configuration.prefetch - 1, 0) * gathered
    buffers = (configuration.scatter_buffers - 1) * reduced
    own = algorithm.kept_bytes * sum(unit.elements for unit in units)
    unreduced = 0.0
    for unit in units if configuration.deferred_reduction != "off" else ():
        size_bytes = unit.elements * unit.dtypes[1].itemsize if unit.is_trained else 0
        if configuration.deferred_reduction == "on":
            unreduced += size_bytes
        elif unit.given.copies is not None:
            unreduced += size_bytes / len(unit.ranks)
    return int(kept + ahead + buffers + merged + own + unreduced)


def copied_bytes(
    units: Sequence[Unit], configuration: Configuration, part: Sequence[int], algorithm: Algorithm
) -> tuple[int, int]:
    """What copies take while the units of a part are gathered, and while their gradients are
    reduced: stripes, and what travels by node, in 16 bits or by another algorithm.

    Args:
        part: the places of units that communicate as one.
        algorithm: that the configuration names.
    """
    own = [units[place] for place in part]
    elements: int = sum(unit.elements for unit in own)
    gathered, reduced = (count * elements for count in algorithm.copied_bytes)
    if configuration.channels > 1 or configuration.hierarchical != "off":
        gathered += sum(unit.elements * unit.dtypes[0].itemsize for unit in own)
        reduced += sum(unit.elements * unit.dtypes[1].itemsize for unit in own)
    if configuration.wire_precision != "as_is":
        reduced += BYTES_OF_16_BITS * elements
    return gathered, reduced


class UnitsMemory(MeasuredMemory):
    """The memory of one rank's device.

    Args:
        units: of the model, in the order in which it lists them.
        algorithm_of: the algorithm that a configuration names.
        node_ranks: on each node.
        device, layout, recomputation: see :class:`MeasuredMemory`.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        device: DeviceMemory,
        layout: Layout,
        algorithm_of: Callable[[Configuration], Algorithm],
        node_ranks: int = 1,
        recomputation: Recomputation | None = None,
    ) -> None:
        self._units, self._algorithm_of, self._node_ranks = units, algorithm_of, node_ranks
        # By unit: the most that was there when it was to be gathered, and reduced, beyond what
        # the configuration holds. What is copied then need not be there at the peak.
        self._beside: dict[int, list[int]] = {}
        super().__init__(device, layout, recomputation)

    def travels(self, unit: int, is_gathered: bool) -> None:
        """A unit is about to be gathered, or else its gradients are to be reduced."""
        held = self._beside.setdefault(unit, [0, 0])
        now_bytes = self._device.now_bytes() - self._held(self._in_force)
        held[not is_gathered] = max(held[not is_gathered], now_bytes)

    def _groups_of(self, configuration: Configuration) -> int:
        """With several channels gradients have none of their own."""
        if configuration.hierarchical != "off":
            return 2 * configuration.channels
        if configuration.node_copy == "on":
            return configuration.channels + 1
        return max(configuration.channels - 1, int(configuration.scatter_group == "own"))

    def _held(self, layout: Layout) -> int:
        configuration = layout.configuration
        algorithm, parts = self._algorithm_of(configuration), layout.partition
        return extra_bytes(self._units, configuration, parts, algorithm, self._node_ranks)

    def _extra_bytes(self, layout: Layout) -> int:
        """What it holds, and what its copies take beyond the peak that there is anyway."""
        configuration = layout.configuration
        algorithm, copies = self._algorithm_of(configuration), 0
        for part in layout.partition:
            found = copied_bytes(self._units, configuration, part, algorithm)
            known = [self._beside[place] for place in part if place in self._beside]
            if self._rest_bytes and known:
                beside = [max(each) for each in zip(*known, strict=True)]
                above = [b + c - self._rest_bytes for b, c in zip(beside, found, strict=True)]
                copies = max(copies, *above)
            else:
                copies = max(copies, sum(found))
        return self._held(layout) + copies

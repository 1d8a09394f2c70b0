"""Which settings of a sharded model can be changed, and why the others cannot."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch.distributed as dist

from bagua_client.algorithms import Algorithm
from bagua_client.communication.communicator import Communicator
from bagua_client.configuration import Configuration
from bagua_client.layout import Layout, TensorSpec
from bagua_client.sharded.memory import BYTES_OF_16_BITS
from bagua_client.torch_private import sharded as torchs
from bagua_client.torch_private.merged_units import families
from bagua_client.torch_private.sharded import Unit
from bagua_client.tunable.looks import a_look
from bagua_wire.knob_kinds import Value
from bagua_wire.knobs import CHANNELS_VALUES, KNOBS

PARTS_KEPT = (0.25, 0.5, 1.0)
"""Shares of the units that are tried as kept, beside none."""
NOT_SEEN = "the order in which the model uses them is known after some steps"
"""Why units cannot be merged yet."""
MOST_CHANNELS = 8
"""A unit's part of one rank is small: 16 stripes lost to 8 wherever both were measured."""
PREFETCHED, BUFFERS = (0, 2), (1, 2)
"""One unit ahead is what torch does anyway; more of either takes memory and showed nothing."""


@dataclass(frozen=True)
class Offer:
    """Which settings of one model can be changed.

    Attributes:
        default: the configuration that the model would have without tuning.
        units: of the model.
        tensors: the units, as the other ranks and the service see them.
        unmergeable: why no units can be merged; empty: some can.
        has_nodes: whether the model's parts can travel by node.
        algorithms: given the allowed names, returns the algorithms that may be tried, the model's
            own first.
    """

    default: Configuration
    units: Sequence[Unit]
    tensors: Sequence[TensorSpec]
    unmergeable: str
    has_nodes: bool = False
    algorithms: Callable[[Collection[str]], Sequence[Algorithm]] = lambda allowed: ()
    has_explicit_buckets = False
    kind = "sharded"
    carried_by: ClassVar[Mapping[str, str]] = {"sharding": "fully_shard"}

    @property
    def bucket_bytes(self) -> tuple[int, int]:
        """The smallest and the largest number of bytes of units that communicate as one."""
        low = self.default.bucket_bytes
        return low, low if self.unmergeable else max(low, sum(s.bytes for s in self.tensors))

    def at_first(self, configuration: Configuration) -> Configuration:
        """Units are merged once it is known in which order the model uses them."""
        return replace(configuration, bucket_bytes=self.default.bucket_bytes)

    def reasons(self, communicator: Communicator) -> list[str]:
        """The reasons why some settings cannot be changed, a sentence each."""
        found = []
        if self._channels_obstacle(communicator):
            found.append(f"one channel: {self._channels_obstacle(communicator)}")
        if self._has_lists:
            found.append("prefetch: the training itself says what is gathered ahead")
        if not self.units[0].has_scatter_buffers:
            found.append("scatter buffers: torch before 2.13 has one")
        if self.unmergeable and self.unmergeable != NOT_SEEN:
            found.append(f"units that communicate as one: {self.unmergeable}")
        if not self._most_kept:
            found.append("kept units: the training keeps all of them")
        return found

    def values(
        self, communicator: Communicator, allowed: Collection[str] = ()
    ) -> dict[str, Sequence[Value]]:
        """The values worth trying of each knob, by knob.

        Args:
            allowed: the values that the user allows although they change the numbers.
        """
        is_wide = self._is_replaceable and any(
            unit.dtypes[1].itemsize > BYTES_OF_16_BITS for unit in self.units
        )
        precisions = [v for v in KNOBS["wire_precision"].kind.tried if str(v) in allowed]
        can_split = not self._channels_obstacle(communicator)
        has_buffers, on_gpu = self.units[0].has_scatter_buffers, communicator.device.type == "cuda"
        most = communicator.most_channels if can_split else 1
        found: dict[str, Sequence[Value]] = {
            "channels": [count for count in CHANNELS_VALUES if count <= min(most, MOST_CHANNELS)],
            "kept_units": self._kept(),
            # Without streams nothing is gathered ahead of its use, nor reduced beside it.
            "prefetch": PREFETCHED if on_gpu and not self._has_lists else (0,),
            "scatter_group": ("shared", "own") if on_gpu and can_split else ("shared",),
            "scatter_buffers": BUFFERS if on_gpu and has_buffers else (1,),
            "wire_precision": ["as_is", *precisions] if is_wide else ("as_is",),
            "hierarchical": ("off", "shards") if self.has_nodes and can_split else ("off",),
            "node_copy": ("off", "on") if self._may_be_spread and can_split else ("off",),
        }
        values: dict[str, Sequence[Value]]
        values = {name: self._first(name, tried) for name, tried in found.items() if len(tried) > 1}
        algorithms = self.algorithms(allowed) if self._is_replaceable else ()
        if len(algorithms) > 1:
            values["algorithm"] = [each.name for each in algorithms]
        return values

    def check(self, layout: Layout) -> None:
        """Check that the model can have the layout and its configuration.

        Raises:
            ValueError: it cannot.
        """
        configuration = layout.configuration
        configuration.check_model(self.kind)
        if self.unmergeable and configuration.bucket_bytes != self.default.bucket_bytes:
            raise ValueError(f"units cannot be merged: {self.unmergeable}")
        if configuration.kept_units > self._most_kept:
            raise ValueError(
                f"{configuration.kept_units} units cannot be kept, as only {self._most_kept} are "
                "gathered twice in a step"
            )
        if configuration.prefetch and self._has_lists:
            raise ValueError("the training itself says what is gathered ahead")
        if configuration.scatter_buffers > 1 and not self.units[0].has_scatter_buffers:
            raise ValueError("torch before 2.13 has one scatter buffer")
        if configuration.hierarchical not in ("off", "shards" if self.has_nodes else "off"):
            raise ValueError(
                f"hierarchical {configuration.hierarchical} is not possible here: the parts of a "
                "sharded model travel by node (shards) where one copy of it is spread over several "
                "nodes with the same number of ranks, more than one"
            )
        if configuration.node_copy == "on" and not self._may_be_spread:
            raise ValueError(
                "a copy in each node is not possible here: one copy of the model must be spread "
                "over several nodes of several ranks each, and by fully_shard alone"
            )
        if uses_ours(configuration) and self._carrying_obstacle:
            raise ValueError(self._carrying_obstacle)
        if configuration.changes_numbers and not self._is_replaceable:
            raise ValueError(self._carrying_obstacle)

    def _first(self, name: str, tried: Sequence[Value]) -> list[Value]:
        default = getattr(self.default, name)
        return [default, *(value for value in tried if value != default)]

    def _kept(self) -> Sequence[int]:
        counts = {round(share * self._most_kept) for share in PARTS_KEPT}
        return sorted({0} | counts)

    @property
    def _most_kept(self) -> int:
        return sum(unit.given.mesh_kept is not None for unit in self.units)

    @property
    def _may_be_spread(self) -> bool:
        return self.has_nodes and any(unit.may_be_spread for unit in self.units)

    @property
    def _has_lists(self) -> bool:
        return any(unit.given.forward or unit.given.backward for unit in self.units)

    @property
    def _is_replaceable(self) -> bool:
        return all(unit.is_replaceable for unit in self.units)

    @property
    def _carrying_obstacle(self) -> str:
        """Why ours cannot communicate in the place of torch's objects; empty: they can."""
        if not self._is_replaceable:
            return "torch before 2.9 does not let others communicate for fully_shard"
        if not all(unit.carries_itself for unit in self.units):
            return "the training's own objects communicate the units"
        return ""

    def _channels_obstacle(self, communicator: Communicator) -> str:
        return self._carrying_obstacle or communicator.obstacle


def default_of(units: Sequence[Unit]) -> Configuration:
    """The configuration with which each unit communicates by itself, as torch has it."""
    return Configuration(min(unit.elements * unit.dtypes[1].itemsize for unit in units))


def specs_of(units: Sequence[Unit]) -> tuple[TensorSpec, ...]:
    """The units as the other ranks and the service see them."""
    return tuple(map(_spec, units, families(units)))


def _spec(unit: Unit, family: str) -> TensorSpec:
    dtype = unit.dtypes[1]
    return TensorSpec(
        name=unit.name or "(root)",
        shape=(unit.elements,),
        element_bytes=dtype.itemsize,
        dtype=str(dtype),
        device=f"{unit.device.type}#0",
        family=family,
    )


def uses_ours(configuration: Configuration, scatters: bool = True) -> bool:
    """Whether other process groups than torch's, or more of them, carry the units.

    Args:
        scatters: whether their gradients count, too.
    """
    by_node, has_own = configuration.hierarchical != "off", configuration.scatter_group == "own"
    return by_node or configuration.channels > 1 or (scatters and has_own)


@a_look
def refusal_of(units: Sequence[Unit]) -> str:
    """Why no setting of a sharded model can be changed; empty: some can."""
    if not torchs.can_be_set():
        return "torch before 2.8 does not let the units of a live model be kept gathered"
    if len({unit.ranks for unit in units}) > 1:
        return "its units are spread over different ranks (several meshes)"
    if len(units[0].ranks) > 1 and sum(map(len, units[0].ranks)) < dist.get_world_size():
        return "its copies (HSDP) are trained by a part of the job's ranks"
    if len(units[0].ranks[0]) == 1:
        return "each rank holds the whole model, so nothing is gathered"
    if {unit.device.type for unit in units} - {"cpu", "cuda"}:
        return f"steps on devices of type {units[0].device.type} cannot be timed here"
    return ""

"""Which settings of a sharded model can be changed, and why the others cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bagua_client.configuration import Configuration
from bagua_client.layout import TensorSpec
from bagua_client.sharded.memory import BYTES_OF_16_BITS
from bagua_client.sharded.settings import MicroBatches
from bagua_client.sharded.traffic import ShardCommunicator, group_of
from bagua_client.torch_private import sharded as torchs
from bagua_client.torch_private.merged_units import families
from bagua_client.torch_private.sharded import Unit
from bagua_client.tunable.looks import a_look, why_not_timed
from bagua_client.tunable.offer import Limit, Offer, only
from bagua_wire.knobs import CHANNELS_VALUES, KNOBS

PARTS_KEPT = (0.25, 0.5, 1.0)
"""Shares of the units that are tried as kept, beside none."""
NOT_SEEN = "the order in which the model uses them is known after some steps"
"""Why units cannot be merged yet."""
NONE_ALIKE = "no two of them are neighbours in a container and spread alike"
MOST_CHANNELS = 8
"""A unit's part of one rank is small: 16 stripes lost to 8 wherever both were measured."""
NOT_REPLACEABLE = "torch before 2.9 does not let others communicate for fully_shard"
SYMMETRIC = "the units communicate from symmetric memory (set_symm_mem_for_comm)"
OWN_OBJECTS = "the training's own objects communicate the units"
AHEAD_ALREADY = "the training itself says what is gathered ahead"
NO_COPIES = "there is one copy of the model, and nothing to sum up over copies"
WHOLE = "each rank holds the whole model, so nothing is gathered"
OF_GATHERS = (
    *("kept_units", "kept_over_micro_batches", "prefetch", "scatter_group", "node_copy"),
    "algorithm",
)
"""Knobs of what is gathered, or of parts."""
NARROW_SUMS = "gradients of several micro-batches are then added in 16 bits"
NODES_NEEDED = (
    "the parts of a sharded model travel by node (shards) where one copy of it is spread over "
    "several nodes with the same number of ranks, more than one"
)
NO_NODE_COPY = (
    "a copy in each node is not possible here: one copy of the model must be spread over several "
    "nodes of several ranks each, and by fully_shard alone"
)
NOT_EVERYWHERE = "no unit is spread over all ranks that train the model"
PART_OF_THE_JOB = (
    "it is trained by a part of the job's ranks, over several meshes or in several copies (HSDP), "
    "and there is no process group of these ranks"
)
PREFETCHED, BUFFERS = (0, 2), (1, 2)
"""One unit ahead is what torch does anyway; more of either takes memory and showed nothing."""


@dataclass(frozen=True, kw_only=True)
class ShardedOffer(Offer):
    """Which settings of a sharded model can be changed.

    Attributes:
        units: of the model.
        tensors: the units, as the other ranks and the service see them.
        unmergeable: why no units can be merged; empty: some can.
        micro_batches: of a step of the optimizer.
    """

    kind = "sharded"
    communicator: ShardCommunicator
    units: Sequence[Unit]
    tensors: Sequence[TensorSpec]
    unmergeable: str
    micro_batches: MicroBatches

    @property
    def carried_by(self) -> Mapping[str, str]:
        ranks, units = self.communicator.world_size, self.units
        kind = "replicate" if units[0].is_whole else "fully_shard"
        if all(len(each.ranks) * len(each.ranks_of_copies) == ranks for each in units):
            return {"sharding": kind}
        sizes = " and ".join(map(str, sorted({len(each.ranks) for each in units})))
        return {"sharding": f"{kind} over {sizes} of {ranks} ranks"}

    def at_first(self, configuration: Configuration) -> Configuration:
        """Units are merged once it is known in which order the model uses them, and nothing is left
        to other micro-batches before it is known what the training does between them."""
        first = super().at_first(configuration)
        return replace(
            first,
            bucket_bytes=self.default.bucket_bytes,
            kept_over_micro_batches="off",
            deferred_reduction="off",
        )

    def limits(self) -> dict[str, Limit]:
        units, communicator, first = self.units, self.communicator, self.first
        symmetric = SYMMETRIC if any(unit.is_symmetric for unit in units) else ""
        is_replaceable = all(unit.is_replaceable for unit in units)
        no_numbers = symmetric if is_replaceable else NOT_REPLACEABLE
        carried = no_numbers or ("" if all(unit.carries_itself for unit in units) else OWN_OBJECTS)
        alone = carried or communicator.obstacle
        is_ahead = any(unit.given.forward or unit.given.backward for unit in units)
        most_kept = sum(unit.is_gathered_twice for unit in units)
        may_be_spread = communicator.has_nodes and any(
            unit.may_be_spread and communicator.is_everywhere(place)
            for place, unit in enumerate(units)
        )
        is_whole = units[0].is_whole
        has_copies = communicator.has_copies and not is_whole
        is_everywhere = any(map(communicator.is_everywhere, range(len(units))))
        is_apart = communicator.topology.is_hierarchical and not (is_everywhere or has_copies)
        on_gpu = communicator.device.type == "cuda"
        one_buffer = symmetric if units[0].has_scatter_buffers else "torch before 2.13 has one"
        is_narrow = any(unit.dtypes[1].itemsize <= BYTES_OF_16_BITS for unit in units)
        is_wide = any(unit.dtypes[1].itemsize > BYTES_OF_16_BITS for unit in units)
        most = min(communicator.most_channels, MOST_CHANNELS)
        one = (alone and f"one channel: {alone}") or communicator.why_one_channel
        low = high = self.default.bucket_bytes
        are_alike = len({spec.group for spec in self.tensors}) < len(self.tensors)
        if not self.unmergeable and are_alike:
            high = max(low, sum(spec.bytes for spec in self.tensors))
        unmerged = "" if self.unmergeable == NOT_SEEN else self.unmergeable
        if not (unmerged or are_alike) and len({unit.ranks for unit in units}) > 1:
            unmerged = NONE_ALIKE

        undeferred = self.micro_batches.undeferrable
        deferred = ("off", "copies", "on") if has_copies else ("off", "on")
        is_one, unkept = self.micro_batches.usual == 1, self.micro_batches.obstacle

        def deferrable(way: str) -> str:
            if way == "off":
                return ""
            no_copies = WHOLE if is_whole else NO_COPIES
            return undeferred or ("" if has_copies or way == "on" else no_copies)

        def kept(count: int) -> str:
            if count <= most_kept:
                return ""
            return f"{count} units cannot be kept, as only {most_kept} are gathered twice in a step"

        def by_node(way: str) -> str:
            if way not in ("off", "shards" if communicator.has_nodes else "off"):
                return f"hierarchical {way} is not possible here: {NODES_NEEDED}"
            return only("off", carried)(way)

        rows = {
            "channels": Limit(
                first("channels", [] if one else [n for n in CHANNELS_VALUES if n <= most]),
                one,
                only(1, carried),
            ),
            # Without streams nothing is gathered ahead of its use, nor reduced beside it.
            "prefetch": Limit(
                first("prefetch", PREFETCHED if on_gpu else ()),
                f"prefetch: {AHEAD_ALREADY}" if is_ahead else "",
                only(0, AHEAD_ALREADY if is_ahead else ""),
            ),
            "scatter_group": Limit(
                first("scatter_group", ("shared", "own") if on_gpu and not alone else ()),
                cannot=only("shared", carried),
            ),
            "scatter_buffers": Limit(
                first("scatter_buffers", BUFFERS if on_gpu else ()),
                one_buffer and f"scatter buffers: {one_buffer}",
                only(1, one_buffer and f"one scatter buffer: {one_buffer}"),
            ),
            "bucket_bytes": Limit(
                (low, high),
                unmerged and f"units that communicate as one: {unmerged}",
                only(low, self.unmergeable and f"units cannot be merged: {self.unmergeable}"),
            ),
            "kept_units": Limit(
                first("kept_units", sorted({0, *(round(p * most_kept) for p in PARTS_KEPT)})),
                "" if most_kept else "kept units: the training keeps all of them",
                kept,
            ),
            "kept_over_micro_batches": Limit(
                first("kept_over_micro_batches", () if is_one or unkept else ("off", "on")),
                unkept and f"nothing is kept over micro-batches: {unkept}",
                only("off", unkept),
            ),
            "deferred_reduction": Limit(
                first("deferred_reduction", () if is_one or undeferred else deferred),
                "" if is_one else undeferred and f"gradients are reduced as ever: {undeferred}",
                deferrable,
                changes=NARROW_SUMS if is_narrow else "",
            ),
            "wire_precision": Limit(
                KNOBS["wire_precision"].kind.tried if is_wide else (),
                cannot=only("as_is", no_numbers),
            ),
            "hierarchical": Limit(
                first(
                    "hierarchical",
                    ("off", "shards") if communicator.has_nodes and not alone else (),
                ),
                f"nothing travels by node: {NOT_EVERYWHERE}" if is_apart else "",
                by_node,
            ),
            "node_copy": Limit(
                first("node_copy", ("off", "on") if may_be_spread and not alone else ()),
                cannot=only("off", "" if may_be_spread else NO_NODE_COPY),
            ),
            "algorithm": Limit(cannot=only("", no_numbers)),
        }
        if is_whole:
            for knob in OF_GATHERS:
                rows[knob] = Limit(cannot=only(getattr(self.default, knob), WHOLE))
            rows["kept_units"] = rows["kept_units"]._replace(left_alone=f"kept units: {WHOLE}")
        return rows


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


@a_look
def refusal_of(units: Sequence[Unit]) -> str:
    """Why no setting of a sharded model can be changed; empty: some can."""
    if not torchs.can_be_set():
        return "torch before 2.8 does not let the units of a live model be kept gathered"
    if not any(unit.travels for unit in units):
        return WHOLE
    if group_of(units) is None:
        return PART_OF_THE_JOB
    return why_not_timed(unit.device for unit in units)

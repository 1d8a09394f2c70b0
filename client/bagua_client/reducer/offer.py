"""Which settings of a wrapped model can be changed while it trains, and why the others cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.nn.parallel import DistributedDataParallel

from bagua_client.configuration import Configuration
from bagua_client.layout import Layout, TensorSpec
from bagua_client.reducer.carrier import survives_recut, why_not_recut
from bagua_client.torch_private import reducer as torchs
from bagua_client.torch_private.reducer import Caps, UserHook
from bagua_client.torch_private.wrapper import knows_parameters
from bagua_client.tunable.looks import a_look, why_not_timed
from bagua_client.tunable.offer import Limit, Offer, only
from bagua_wire.knob_kinds import Value
from bagua_wire.knobs import BUCKET_SIZES, CHANNELS_VALUES, EDGE_BUCKET_BYTES, KNOBS

MOST = 2**62
THEIRS = (
    "the training's own communication hook carries the buckets; only their sizes can be changed"
)
LEAVES_FIRST_STEP_OUT = (
    "torch has not reduced the first step of this static graph, as its backward pass did not begin "
    "at the wrapper's output; it would not reduce the first one after a re-cut either"
)


@dataclass(frozen=True, kw_only=True)
class ReplicatedOffer(Offer):
    """The settings that this torch release, the wrapper and the training's own hook let us change.

    Attributes:
        default_caps: the bucket caps that torch had when the model was wrapped.
        tensors: specs of the model's tensors.
        in_ready_order: whether torch cuts buckets in the order in which gradients become ready.
        hook: the training's own communication hook, which carries the buckets; None: torch or this
            package carries them.
    """

    kind = "replicated"
    default_caps: Caps
    tensors: Sequence[TensorSpec]
    in_ready_order: bool
    hook: UserHook | None

    def at_first(self, configuration: Configuration) -> Configuration:
        """An explicit list counts in the order in which gradients become ready."""
        return replace(super().at_first(configuration), buckets=())

    def limits(self) -> dict[str, Limit]:
        """The rows of a model that nobody else carries the buckets of."""
        own, obstacle = self.default.bucket_bytes, self._obstacle
        sizes = min(BUCKET_SIZES.low_bytes, own), max(BUCKET_SIZES.high_bytes, own)
        uneven = obstacle and (
            f"explicit buckets and a last bucket of another size are not possible: {obstacle}"
        )
        told = obstacle and f"explicit buckets and a last bucket of its own: {obstacle}"
        is_wide = any(tensor.bytes > 2 * tensor.elements for tensor in self.tensors)
        return {
            "bucket_bytes": Limit(sizes),
            "hierarchical": Limit(self._ways(), fewest=1),
            "channels": Limit(self._channels(), self._why_one_channel(), fewest=1),
            "first_bucket_bytes": Limit(self._first_sizes(), fewest=1),
            "last_bucket_bytes": Limit(EDGE_BUCKET_BYTES, cannot=only(0, uneven), fewest=1),
            "wire_precision": Limit(KNOBS["wire_precision"].kind.tried if is_wide else ()),
            "algorithm": Limit(left_alone=describe_hook(self.hook) if self.hook else ""),
            "buckets": Limit(left_alone=told, cannot=only((), uneven)),
        }

    def table(self) -> dict[str, Limit]:
        """Beside a hook of the training's own only the sizes of buckets can be changed, and under
        some hooks nothing."""
        rows, hook = super().table(), self.hook
        if hook is None:
            return rows
        fixed = _obstacle_of(hook) if hook.run is not None and why_not_recut(hook.run) else ""
        given = configuration_of(self.default_caps)
        for name, row in rows.items():
            if KNOBS[name].computes:
                continue
            if not KNOBS[name].cuts:
                rows[name] = row._replace(cannot=only(KNOBS[name].default, fixed or THEIRS))
            elif fixed:
                rows[name] = row._replace(cannot=only(getattr(given, name), fixed))
        return rows

    def _ways(self) -> Sequence[Value]:
        topology = self.communicator.topology
        if self.communicator.obstacle or not topology.is_hierarchical:
            return ("off",)
        # Which of the two is faster depends on the links inside and between the nodes.
        return ("off", "leaders", "shards") if topology.is_uniform else ("off", "leaders")

    def _channels(self) -> Sequence[Value]:
        if self._why_one_channel():
            return (self.default.channels,)
        return [count for count in CHANNELS_VALUES if count <= self.communicator.most_channels]

    def _why_one_channel(self) -> str:
        if obstacle := self.communicator.obstacle:
            return f"one channel, and no way to reduce but flat: {obstacle}"
        return self.communicator.why_one_channel

    def _first_sizes(self) -> Sequence[Value]:
        sizes = {self.default.first_bucket_bytes}
        if self.in_ready_order:
            sizes |= {size for size in EDGE_BUCKET_BYTES if torchs.can_cut(_ends(MOST, size))}
        return sorted(sizes)

    def caps(self, layout: Layout) -> Caps:
        """The bucket caps with which torch cuts ``layout``, whose configuration is a possible one.

        Raises:
            ValueError: torch cannot cut it.
        """
        asked = layout.configuration
        if asked == self.default and asked.cut == configuration_of(self.default_caps).cut:
            return self.default_caps
        if asked.buckets or asked.last_bucket_bytes:
            sizes = tuple(sum(self.tensors[i].bytes for i in bucket) for bucket in layout.partition)
            return Caps(max(sizes), sizes[0], sizes)
        caps = _ends(asked.bucket_bytes, asked.first_bucket_bytes)
        if not torchs.can_cut(caps):
            raise ValueError(f"this torch cannot cut a first bucket of {caps.first_bytes} B")
        return caps

    @property
    def _obstacle(self) -> str:
        """Why torch cannot give each bucket its own cap; empty: it can."""
        if not torchs.HAS_BUCKET_CAPS:
            return "torch before 2.11 cannot set the size of each bucket"
        if not self.in_ready_order:
            return (
                "with find_unused_parameters=True torch cuts in the order in which the model "
                "lists its parameters"
            )
        if any(tensor.is_sparse for tensor in self.tensors):
            return "torch gives each sparse gradient a bucket of its own"
        if len({tensor.group for tensor in self.tensors}) > 1:
            return "torch counts its caps anew for each dtype and device, and this model has more"
        return ""


@a_look
def refusal_of(ddp: DistributedDataParallel, default_caps: Caps) -> str:
    """Why no setting can be changed while this training runs; empty: some can."""
    if not torchs.has_reducer(ddp):
        return "torch reduces the gradients without its C++ reducer, so there are no buckets"
    if untimed := why_not_timed([ddp.device]):
        return untimed
    if not knows_parameters(ddp):
        return "other parameters are trained now than when torch's wrapper was made; make it anew"
    if default_caps.each_bytes:
        return "bucket_cap_mb_list was given, which already sets each bucket"
    if torchs.finalizes_by_hand(ddp):
        return "the training itself ends each backward pass (manual finalization)"
    if torchs.leaves_buckets_out(ddp):
        return "with skip_all_reduce_unused_params=True not every bucket is reduced in every step"
    if torchs.leaves_first_step_out(ddp):
        return LEAVES_FIRST_STEP_OUT
    hook = torchs.user_hook_of(ddp)
    return "" if hook is None else _obstacle_of(hook)


def describe_hook(hook: UserHook) -> str:
    """A sentence that says what can be tuned beside the training's own ``hook``."""
    return (
        f"the training's communication hook {hook.name} carries the buckets, so only their sizes "
        "are tuned"
    )


def _obstacle_of(hook: UserHook) -> str:
    if hook.run is not None:
        if survives_recut(hook.run):
            return ""
        if known := why_not_recut(hook.run):
            return f"with the communication hook {hook.name} no bucket may change: {known}"
    return (
        f"the training's communication hook {hook.name} may keep state for each bucket, which a "
        "re-cut would invalidate; if it keeps none, set survives_recut = True on it"
    )


def _ends(bucket_bytes: int, first_bucket_bytes: int) -> Caps:
    return Caps(bucket_bytes, min(first_bucket_bytes or bucket_bytes, bucket_bytes))


def configuration_of(caps: Caps) -> Configuration:
    """The configuration that is equivalent to torch's own ``caps``."""
    first_bytes = caps.first_bytes if caps.first_bytes < caps.bucket_bytes else 0
    return Configuration(caps.bucket_bytes, first_bucket_bytes=first_bytes)

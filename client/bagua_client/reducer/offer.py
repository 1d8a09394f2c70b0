"""Which settings of a wrapped model can be changed while it trains, and why the others cannot."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch.nn.parallel import DistributedDataParallel

from bagua_client.algorithms import Algorithm
from bagua_client.communication.communicator import Communicator
from bagua_client.configuration import Configuration
from bagua_client.layout import Layout, TensorSpec
from bagua_client.reducer.comm_hook import survives_recut, why_not_recut
from bagua_client.torch_private import reducer as torchs
from bagua_client.torch_private.reducer import Caps, UserHook
from bagua_client.torch_private.wrapper import knows_parameters
from bagua_client.tunable.looks import a_look
from bagua_wire.knob_kinds import Value
from bagua_wire.knobs import BUCKET_SIZES, CHANNELS_VALUES, EDGE_BUCKET_BYTES, KNOBS

KNOWN_DEVICES = ("cpu", "cuda")
MOST = 2**62
LEAVES_FIRST_STEP_OUT = (
    "torch has not reduced the first step of this static graph, as its backward pass did not begin "
    "at the wrapper's output; it would not reduce the first one after a re-cut either"
)


@dataclass(frozen=True)
class Offer:
    """The settings that this torch release, the wrapper and the training's own hook let us change.

    Attributes:
        default: the configuration that the job begins with.
        default_caps: the bucket caps that torch had when the model was wrapped.
        tensors: specs of the model's tensors.
        in_ready_order: whether torch cuts buckets in the order in which gradients become ready.
        hook: the training's own communication hook, which carries the buckets; None: torch or this
            package carries them.
        algorithms: given the allowed names, returns the algorithms that may be tried, the
            wrapper's own first.
    """

    default: Configuration
    default_caps: Caps
    tensors: Sequence[TensorSpec]
    in_ready_order: bool
    hook: UserHook | None
    algorithms: Callable[[Collection[str]], Sequence[Algorithm]] = lambda allowed: ()
    kind = "replicated"
    carried_by: ClassVar[Mapping[str, str]] = {}

    def at_first(self, configuration: Configuration) -> Configuration:
        """An explicit list counts in the order in which gradients become ready."""
        return replace(configuration, buckets=())

    def reasons(self, communicator: Communicator) -> list[str]:
        """The reasons why some settings cannot be changed, a sentence each."""
        found = []
        if communicator.obstacle:
            found.append(f"one channel, and no way to reduce but flat: {communicator.obstacle}")
        elif _fills_links(communicator):
            found.append("one channel: all ranks are on one host, whose links NCCL fills with one")
        if self.hook is not None:
            found.append(describe_hook(self.hook))
        if self._obstacle:
            found.append(f"explicit buckets and a last bucket of its own: {self._obstacle}")
        return found

    @property
    def bucket_bytes(self) -> tuple[int, int]:
        """The smallest and the largest size of a bucket that is tried."""
        default = self.default.bucket_bytes
        return min(BUCKET_SIZES.low_bytes, default), max(BUCKET_SIZES.high_bytes, default)

    @property
    def has_explicit_buckets(self) -> bool:
        """Whether torch can cut an explicit list of buckets."""
        return not self._obstacle

    def values(
        self, communicator: Communicator, allowed: Collection[str] = ()
    ) -> dict[str, Sequence[Value]]:
        """The values worth trying of each knob that has few, by knob.

        Args:
            allowed: the values that the user allows although they change the numbers.
        """
        limited: dict[str, Sequence[Value]] = {
            "hierarchical": self._ways(communicator),
            "channels": self._channels(communicator),
            "first_bucket_bytes": self._first_sizes(),
            "last_bucket_bytes": [0] if self._obstacle else EDGE_BUCKET_BYTES,
            "wire_precision": self._usual("wire_precision", allowed) if self._is_wide else (),
            "algorithm": self._algorithms(allowed),
        }
        ours = [name for name, knob in KNOBS.items() if self.kind in knob.models]
        found = {name: limited.get(name, self._usual(name, allowed)) for name in ours}
        return {name: list(values) for name, values in found.items() if values}

    def _usual(self, name: str, allowed: Collection[str]) -> Sequence[Value]:
        """The values of a knob that nothing limits but the user; none if there is no choice."""
        knob, default = KNOBS[name], getattr(self.default, name)
        if self.hook is not None and not knob.cuts:
            return ()
        tried = [v for v in knob.kind.tried if not knob.changes_numbers or str(v) in allowed]
        others = [value for value in tried if value != default]
        return [default, *others] if others else ()

    def _ways(self, communicator: Communicator) -> Sequence[Value]:
        topology = communicator.topology
        if communicator.obstacle or self.hook is not None or not topology.is_hierarchical:
            return ("off",)
        # Which of the two is faster depends on the links inside and between the nodes.
        return ("off", "leaders", "shards") if topology.is_uniform else ("off", "leaders")

    def _channels(self, communicator: Communicator) -> Sequence[Value]:
        if communicator.obstacle or self.hook is not None or _fills_links(communicator):
            return (self.default.channels,)
        return [count for count in CHANNELS_VALUES if count <= communicator.most_channels]

    def _first_sizes(self) -> Sequence[Value]:
        sizes = {self.default.first_bucket_bytes}
        if self.in_ready_order:
            sizes |= {size for size in EDGE_BUCKET_BYTES if torchs.can_cut(_ends(MOST, size))}
        return sorted(sizes)

    def _algorithms(self, allowed: Collection[str]) -> Sequence[Value]:
        choices = self.algorithms(allowed) if self.hook is None else []
        # Buckets do not matter to an algorithm that communicates weights. The service must be told
        # its name to know that, even when there is no other choice.
        if len(choices) > 1 or any(each.moves_weights for each in choices):
            return [each.name for each in choices]
        return ()

    @property
    def _is_wide(self) -> bool:
        """Whether some gradient has more than 16 bits."""
        return any(tensor.bytes > 2 * tensor.elements for tensor in self.tensors)

    def caps(self, layout: Layout) -> Caps:
        """The bucket caps with which torch cuts ``layout``.

        Raises:
            ValueError: torch cannot cut it, or its buckets cannot travel as it says.
        """
        asked = layout.configuration
        asked.check_model(self.kind)
        if asked == self.default and asked.cut == configuration_of(self.default_caps).cut:
            return self.default_caps
        if self.hook is not None and self.hook.run is not None and why_not_recut(self.hook.run):
            raise ValueError(_obstacle_of(self.hook))
        if self.hook is not None and not asked.is_torchs_way:
            raise ValueError(
                "the training's own communication hook carries the buckets; only their sizes "
                "can be changed"
            )
        if not asked.buckets and not asked.last_bucket_bytes:
            caps = _ends(asked.bucket_bytes, asked.first_bucket_bytes)
            if not torchs.can_cut(caps):
                raise ValueError(f"this torch cannot cut a first bucket of {caps.first_bytes} B")
            return caps
        if self._obstacle:
            raise ValueError(
                "explicit buckets and a last bucket of another size are not possible: "
                f"{self._obstacle}"
            )
        sizes = tuple(sum(self.tensors[i].bytes for i in bucket) for bucket in layout.partition)
        return Caps(max(sizes), sizes[0], sizes)

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


def _fills_links(communicator: Communicator) -> bool:
    """Whether one channel fills all links. It does when all GPUs are on one host (over NVLink 100
    MB take 0.4 ms); more channels would only take multiprocessors from the training."""
    return communicator.device.type == "cuda" and len(communicator.topology.nodes) == 1


@a_look
def refusal_of(ddp: DistributedDataParallel, default_caps: Caps) -> str:
    """Why no setting can be changed while this training runs; empty: some can."""
    if not torchs.has_reducer(ddp):
        return "torch reduces the gradients without its C++ reducer, so there are no buckets"
    if ddp.device.type not in KNOWN_DEVICES:
        return f"steps on devices of type {ddp.device.type} cannot be timed here"
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

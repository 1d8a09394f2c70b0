"""An engine of DeepSpeed: the sizes by which its ZeRO optimizer communicates are read, and changed
between two steps.

DeepSpeed has no method for it. All of its attributes that are used stand in this module, as its
release 0.19.8 has them (``deepspeed/runtime/zero``, github.com/deepspeedai/DeepSpeed). Where one is
not there, nothing is tuned.

- ``reduce_bucket_size`` is compared with what a bucket holds whenever a gradient is ready. Stages 1
  and 2 allocate their buffers of that size anew in each step. Stage 3 allocates its buffer once, so
  there it can only be lowered.
- The prefetch size of stage 3 is compared each time a module's parameters are fetched.
- ``allgather_bucket_size`` (stages 1 and 2) is not used where torch has ``all_gather_into_tensor``,
  as all releases have that we support. So nothing is to be tuned there.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from bagua_client.algorithms import DEFAULT_ALGORITHM, find
from bagua_client.communication.communicator import Communicator
from bagua_client.configuration import Configuration
from bagua_client.layout import Layout, TensorSpec, plan
from bagua_client.tunable.looks import a_look
from bagua_client.tunable.memory import DeviceMemory, MeasuredMemory
from bagua_client.tunable.offer import Limit, Offer, only
from bagua_client.tunable.recomputation import Recomputation
from bagua_client.tunable.tunable import Tunable
from bagua_wire.knobs import BUCKET_SIZES

ENGINE = "deepspeed.runtime.engine", "DeepSpeedEngine"
STAGES_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
STAGE_3 = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
PREFETCH = "_PartitionedParameterCoordinator__prefetch_bucket_sz"
NAMES = (
    "optimizer",
    "dp_process_group",
    "reduce_bucket_size",
    "ipg_buckets",
    "get_param_comm_dtype",
)
"""Of every ZeRO optimizer."""
NAMES_OF_STAGE = {
    STAGES_1_AND_2: ("partition_gradients", "bit16_groups", "ready_for_gradients"),
    STAGE_3: ("fp16_groups",),
}
OTHER_RELEASE = "this release of DeepSpeed keeps its bucket sizes elsewhere"
OFFLOADED = "it offloads {} to the CPU or to a disk, which other settings decide"


class Sizes(NamedTuple):
    """Attributes:
    bucket: elements of gradients that are reduced as one.
    prefetch: elements of parameters that are gathered ahead; 0: stages 1 and 2 gather none.
    """

    bucket: int
    prefetch: int = 0


def is_engine(model: object) -> bool:
    """Whether this is an engine of DeepSpeed; imports nothing."""
    module, name = ENGINE
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(model, kind)


@a_look
def refusal_of(engine: Any) -> str:
    """Why none of the sizes can be changed; empty: some can."""
    try:
        return _refusal(engine)
    except AttributeError as error:
        return f"{OTHER_RELEASE} ({error})"


def _refusal(engine: Any) -> str:
    optimizer, config = engine.optimizer, engine._config.zero_config
    kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
    if engine.pipeline_parallelism:
        return "it is a pipeline, which reduces its gradients by itself"
    if kind not in (STAGES_1_AND_2, STAGE_3):
        if engine.zero_optimization_stage() == 0:
            return (
                "ZeRO is off (stage 0): DeepSpeed then reduces all gradients after the backward "
                "pass, in messages whose size nothing sets"
            )
        return f"its optimizer is {type(optimizer).__name__}, of which no bucket size is known"
    if engine.is_deepcompile_enabled():
        return "DeepCompile takes its bucket sizes into what it compiles"
    if engine.has_moe_layers:
        return "some of its gradients travel between experts, in groups of their own"
    _look_up(engine, ("zero_overlap_comm",))
    _look_up(optimizer, (*NAMES, *NAMES_OF_STAGE[kind]))
    for bucket in optimizer.ipg_buckets.values():
        _look_up(bucket, ("elements",))
    if kind == STAGES_1_AND_2:
        return OFFLOADED.format("its optimizer") if optimizer.cpu_offload else ""
    if optimizer.offload_optimizer or optimizer.offload_param:
        return OFFLOADED.format("its parameters or optimizer")
    if config.zero_quantized_gradients:
        return "its gradients travel quantized, in blocks that depend on the bucket"
    if config.zero_hpz_partition_size > 1:
        return "its parameters are also spread over a part of the ranks (hpZ)"
    if not optimizer.reduce_scatter:
        return "reduce_scatter is off: how stage 3 then reduces depends on the bucket"
    _look_up(_coordinator(optimizer), (PREFETCH,))
    return ""


def _look_up(owner: Any, names: Sequence[str]) -> None:
    """Raise AttributeError if it lacks one of them."""
    for name in names:
        getattr(owner, name)


def _coordinator(optimizer: Any) -> Any:
    return optimizer.parameter_offload.get_param_coordinator()


class Buckets:
    """The sizes of one engine, which can be changed (see :func:`refusal_of`). It does not keep the
    engine.

    Attributes:
        stage: 1, 2 or 3.
        engine: in words, what decides which sizes are fast.
        group: the ranks that reduce gradients together.
        device: of the parameters.
        tensors: the parameters that are trained, in the order in which gradients usually become
            ready; their bytes are those of their gradients as they travel.
        element_bytes: of a gradient as it travels; of several dtypes the widest.
        parameter_bytes: of an element of a parameter.
        copies: how often DeepSpeed may hold a bucket: its buffers (two where it reduces beside the
            computing), and what it copies to send it.
        given: the sizes that the training has set.
    """

    def __init__(self, engine: Any) -> None:
        optimizer = engine.optimizer
        self._optimizer = weakref.ref(optimizer)
        self.is_sharded = f"{type(optimizer).__module__}.{type(optimizer).__name__}" == STAGE_3
        self.stage = 3 if self.is_sharded else 1 + bool(optimizer.partition_gradients)
        self.group: dist.ProcessGroup = optimizer.dp_process_group
        self.given = self.read()
        groups = optimizer.fp16_groups if self.is_sharded else optimizer.bit16_groups
        names = {id(each): name for name, each in engine.module.named_parameters()}
        trained = [each for group in groups for each in group if each.requires_grad]
        self.device: torch.device = trained[0].device
        self.tensors: Sequence[TensorSpec]
        self.tensors = [
            self._spec(each, names.get(id(each), f"parameter {place}"))
            for place, each in reversed([*enumerate(trained)])
        ]
        self.element_bytes = max(spec.element_bytes for spec in self.tensors)
        self.parameter_bytes: int = max(each.element_size() for each in trained)
        overlaps = bool(engine.zero_overlap_comm())
        self.copies = 3 if self.is_sharded or not overlaps else 4
        release = getattr(sys.modules.get("deepspeed"), "__version__", "")
        beside = ", overlap_comm" * overlaps
        self.engine = f"DeepSpeed {release}, ZeRO stage {self.stage}{beside}"

    @property
    def optimizer(self) -> Any:
        """The ZeRO optimizer. Raises ReferenceError once it is gone."""
        found = self._optimizer()
        if found is None:
            raise ReferenceError("the engine is gone")
        return found

    def read(self) -> Sizes:
        """The sizes in force."""
        optimizer = self.optimizer
        ahead = getattr(_coordinator(optimizer), PREFETCH) if self.is_sharded else 0
        return Sizes(int(optimizer.reduce_bucket_size), int(ahead))

    def put(self, sizes: Sizes) -> None:
        """Put sizes in force; only where :attr:`are_idle`."""
        optimizer = self.optimizer
        optimizer.reduce_bucket_size = sizes.bucket
        if self.is_sharded:
            setattr(_coordinator(optimizer), PREFETCH, sizes.prefetch)

    @property
    def are_idle(self) -> bool:
        """Whether no gradient is in a bucket, and no buffer of the size in force is in use."""
        optimizer = self.optimizer
        is_open = False if self.is_sharded else optimizer.ready_for_gradients
        return not is_open and not any(each.elements for each in optimizer.ipg_buckets.values())

    def _spec(self, parameter: Any, name: str) -> TensorSpec:
        dtype = self.optimizer.get_param_comm_dtype(parameter)
        return TensorSpec(
            name=name,
            shape=tuple(parameter.ds_shape if self.is_sharded else parameter.shape),
            element_bytes=dtype.itemsize,
            dtype=str(dtype),
            device=f"{parameter.device.type}#0",
        )


# Which settings can be changed, and to what. DeepSpeed counts elements, a configuration bytes:
# those of an element of a gradient as it travels, also for the parameters that are gathered ahead.

AHEAD = (1 / 16, 1 / 4, 4, 16)
"""What is tried as gathered ahead, beside none, in terms of what the training has set."""
PARTS_AHEAD = (1 / 16, 1 / 4)
"""What is tried as gathered ahead where the training has set none, as parts of the model."""


@dataclass(frozen=True, kw_only=True)
class EngineOffer(Offer):
    """Which settings of one engine can be changed.

    Attributes:
        given: that of :func:`default_of`.
        buckets: its sizes.
    """

    kind = "zero"
    given: Configuration
    buckets: Buckets

    @property
    def carried_by(self) -> Mapping[str, str]:
        return {"engine": self.buckets.engine, "element_bytes": str(self.buckets.element_bytes)}

    def limits(self) -> dict[str, Limit]:
        """More than all gradients would only take memory; the one buffer of stage 3 stays as large
        as it was made, and only stage 3 gathers ahead."""
        own, ahead = self.default.bucket_bytes, self.default.prefetch_bytes
        low, largest = min(BUCKET_SIZES.low_bytes, own), _all_bytes(self.buckets)
        theirs = Limit(
            left_alone="channels and ways to reduce: DeepSpeed carries its buckets itself"
        )
        if not self.buckets.is_sharded:
            high = max(min(largest, BUCKET_SIZES.high_bytes), own)
            return {
                "channels": theirs,
                "bucket_bytes": Limit((low, high)),
                "prefetch_bytes": Limit(
                    left_alone="allgather_bucket_size: DeepSpeed does not use it with this torch",
                    cannot=only(0, "only ZeRO's stage 3 gathers parameters ahead"),
                ),
            }
        shares = [ahead * share for share in AHEAD] if ahead else [largest * p for p in PARTS_AHEAD]
        tried = dict.fromkeys([0, *(min(round(size), largest) for size in shares)])
        buffer = "ZeRO's stage 3 keeps the buffer that it began with"
        return {
            "channels": theirs,
            "bucket_bytes": Limit(
                (low, self.given.bucket_bytes),
                "larger buckets: stage 3 keeps the buffer that it began with",
                lambda size: buffer if size > self.given.bucket_bytes else "",
            ),
            "prefetch_bytes": Limit(self.first("prefetch_bytes", list(tried)), fewest=1),
        }


def default_of(buckets: Buckets) -> Configuration:
    """What the training has set, as far as it makes a difference: no bucket holds more than all
    gradients."""
    return Configuration(
        bucket_bytes=min(buckets.given.bucket * buckets.element_bytes, _all_bytes(buckets)),
        prefetch_bytes=min(buckets.given.prefetch * buckets.element_bytes, _all_bytes(buckets)),
    )


def sizes_of(configuration: Configuration, given: Configuration, buckets: Buckets) -> Sizes:
    """What a configuration sets.

    Args:
        given: that of :func:`default_of`, which stands for what the training has set.
    """
    bucket = max(configuration.bucket_bytes // buckets.element_bytes, 1)
    prefetch = configuration.prefetch_bytes // buckets.element_bytes
    if configuration.bucket_bytes == given.bucket_bytes:
        bucket = buckets.given.bucket
    if configuration.prefetch_bytes == given.prefetch_bytes:
        prefetch = buckets.given.prefetch
    return Sizes(bucket, prefetch)


def _all_bytes(buckets: Buckets) -> int:
    return buckets.element_bytes * sum(spec.elements for spec in buckets.tensors)


# How much of a device's memory the sizes of an engine need.


def held_bytes(sizes: Sizes, buckets: Buckets) -> int:
    """What is there at most of an engine's buckets, and of the parameters that it gathers ahead."""
    all_elements = sum(spec.elements for spec in buckets.tensors)
    # Stages 1 and 2 allocate all of a buffer, also where no bucket fills it.
    sent = min(sizes.bucket, all_elements)
    buffered = sent if buckets.is_sharded else sizes.bucket
    reduced = (buffered * (buckets.copies - 2) + 2 * sent) * buckets.element_bytes
    return reduced + min(sizes.prefetch, all_elements) * buckets.parameter_bytes


class BucketsMemory(MeasuredMemory):
    """The memory of one rank's device.

    Args:
        buckets: whose sizes a layout sets.
        device, layout, recomputation: see :class:`MeasuredMemory`.
    """

    def __init__(
        self,
        buckets: Buckets,
        device: DeviceMemory,
        layout: Layout,
        recomputation: Recomputation | None = None,
    ) -> None:
        self._buckets, self._as_given = buckets, layout.configuration
        super().__init__(device, layout, recomputation)

    def _extra_bytes(self, layout: Layout) -> int:
        sizes = sizes_of(layout.configuration, self._as_given, self._buckets)
        return held_bytes(sizes, self._buckets)


IN_USE = "a bucket is in use where a step ends"


class TunableEngine(Tunable):
    """The sizes of one engine. All ranks must make theirs together; see :class:`Tunable`.

    A step ends where the engine's ``step`` has updated the parameters, which all ranks do together.
    By then no gradient is in a bucket: there a change is made.

    Args:
        engine: of which some sizes can be changed.
        buckets: its sizes.
        communicator: of the ranks that reduce its gradients together.
    """

    cannot, failed = "cannot set its sizes", "setting the sizes failed"

    def __init__(self, engine: Any, buckets: Buckets, communicator: Communicator) -> None:
        super().__init__(communicator, engine.module, buckets.device)
        self._engine, self.buckets = weakref.ref(engine), buckets
        # The optimizer that steps is known, and holds other tensors than the model does.
        self.parameters = ()
        self.tensors = tuple(buckets.tensors)
        self.order = tuple(range(len(self.tensors)))
        self.algorithm = find(DEFAULT_ALGORITHM)
        self._given = self.default = self.recomputation.named(default_of(buckets))
        self.layout = plan(self.tensors, self.order, self.default)
        if self.device_memory is not None:
            self.memory = BucketsMemory(
                buckets, self.device_memory, self.layout, self.recomputation
            )

    # Plan

    @property
    def offer(self) -> EngineOffer:
        return EngineOffer(
            default=self.default,
            communicator=self.communicator,
            algorithms=lambda allowed: [self.algorithm],
            given=self._given,
            buckets=self.buckets,
            recomputed=self.recomputed,
        )

    @property
    def refusal(self) -> str:
        return refusal_of(self._engine())

    @property
    def is_left(self) -> bool:
        return self._engine() is None

    def plan(self, configuration: Configuration) -> Layout:
        """See :meth:`Tunable.plan`. DeepSpeed closes a bucket before the gradient that would not
        fit any more; the layout's buckets, which nothing is sent by, end with it."""
        if configuration.algorithm == self.algorithm.name:
            configuration = replace(configuration, algorithm="")
        return super().plan(configuration)

    def change(self, layout: Layout) -> bool:
        """See :meth:`Tunable.change`: at once, or at the end of this step where it has begun."""
        self.schedule(layout)
        return self._carry_out() if self.buckets.are_idle else True

    def step_ends(self) -> None:
        """The engine has updated the parameters, on all ranks."""
        self._count_step()
        self.listener.reduced()
        if self._next is not None:
            self._carry_out()

    def _put(self, layout: Layout) -> None:
        if not self.buckets.are_idle:
            raise RuntimeError(IN_USE)
        self.buckets.put(sizes_of(layout.configuration, self._given, self.buckets))
        self.recomputation.put(layout.configuration.recomputed_blocks)

    def _described(self, layout: Layout) -> str:
        return f"ZeRO stage {self.buckets.stage} communicates by {layout.configuration}, set"

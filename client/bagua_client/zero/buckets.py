"""The sizes by which a ZeRO optimizer of DeepSpeed communicates: read, and set between two steps.

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
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from bagua_client.layout import TensorSpec
from bagua_client.tunable.looks import a_look

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
        self._stepping = weakref.ref(optimizer.optimizer)
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

    @property
    def stepping(self) -> torch.optim.Optimizer | None:
        """The optimizer of torch's that makes the step, on the parameters of this rank."""
        return self._stepping()

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

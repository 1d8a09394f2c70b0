"""Small models under ``fully_shard``, trained as trainings do, beside an untouched one."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import bagua_client
from bagua_client.communication import link
from bagua_client.integrations.sharded_model import ShardedModel, tunable_of
from bagua_client.sharded.tunable_units import TunableUnits

WIDTH = 9
EXPERTS = 4
CAN_MERGE = hasattr(FSDPModule, "reset_iter_state")
MERGES = pytest.mark.skipif(not CAN_MERGE, reason="torch before 2.13 lacks what merges units")
Changes = Mapping[int, Mapping[str, Any]]
"""Before which step which knobs have other values than the default's."""


@dataclass(frozen=True)
class Kind:
    """A way in which models are sharded and trained."""

    replicas: int = 1
    tensor_ranks: int = 1
    """Over so many ranks tensor parallelism splits the blocks, before ``fully_shard``."""
    expert_ranks: int = 1
    """Over so many ranks the experts in every second block are spread, before ``fully_shard``
    spreads them over the others; 1: there are none."""
    experts_share: bool = False
    """Whether their block's call of ``fully_shard`` takes them along, on a mesh of their own."""
    width: int = WIDTH
    """Even: gloo's sums over four ranks are then the same, bit for bit, also in stripes."""
    replicates: bool = False
    """By ``replicate`` on the code of ``fully_shard``: each rank holds the whole model."""
    blocks: int = 4
    checkpoints: bool = False
    micro_batches: tuple[int, ...] = (1,)
    """Of each step, in turn."""
    awaits: str = "gradient sync"
    """Only the last micro-batch does this; ``reshard``: this and resharding; or ``all-reduce``;
    empty: each does all."""
    awaits_from: int = 0
    """The step from which it is so."""
    tells: str = ""
    """By whose call the training says which is the last: ``ours`` or ``torch's``."""
    ends_itself: bool = False
    """Whether the training ends its backward passes by hand (since torch 2.15)."""
    amid: str = ""
    """What the training does between two micro-batches."""
    amid_from: int = 0
    """The step from which it does so."""
    skips: int = 0
    """Each step of a number that this divides throws its gradients away."""
    freezes_from: int = 0
    """The step from which the blocks are frozen for two steps; 0: never."""
    divides_from: int = 0
    """The step from which the training divides gradients by 3; 0: never."""
    calls_from: int = 0
    """The step from which units ask their process group for memory, and reduce what was not used;
    0: never."""
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = torch.float32
    clips: bool = False
    scales: bool = False
    """By a ``GradScaler`` that begins so high that it leaves some steps out."""
    offloads: bool = False
    hooks: bool = False
    """Whether the training has forward hooks of its own on each block, around torch's."""
    reduces_from: int = -1
    """The step from which an object of the training's reduces each unit, and remembers its size;
    -1: never."""
    ignores: bool = False
    tied: bool = False
    frozen: bool = False
    user_keeps: bool = False
    ranks_after_forward: int = 0
    """Over how many ranks parameters are spread from forward to backward; 0: over all."""
    compiles: str = ""
    has: str = ""
    """What torch has since 2.15."""
    between: str = ""
    """What the training does between its backward pass and the optimizer's step, or after it."""


class Experts(nn.Module):
    """Each rank of a mesh has some of them, and sends the others the rows that are theirs."""

    def __init__(self, mesh: DeviceMesh, width: int) -> None:
        super().__init__()
        self.mesh = mesh
        whole = torch.randn(EXPERTS, width, width) / width**0.5
        self.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        ranks, rank = self.mesh.size(), self.mesh.get_local_rank()
        sent = [len(each) for each in values.tensor_split(ranks)]
        received = [sent[rank]] * ranks
        weight = cast(DTensor, self.weight).to_local()
        own = all_to_all_single_autograd(values, received, sent, self.mesh.get_group())
        own = torch.cat(
            [part @ each for part, each in zip(own.chunk(len(weight)), weight, strict=False)]
        )
        return all_to_all_single_autograd(own, sent, received, self.mesh.get_group()) + values


class Net(nn.Module):
    def __init__(self, kind: Kind, experts: DeviceMesh | None = None) -> None:
        super().__init__()
        width = kind.width
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(kind.blocks)
        )
        if experts is not None:
            for block in self.blocks[::2]:
                cast(nn.Sequential, block).append(Experts(experts, width))
        self.head = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.ones(width))
        if kind.tied:
            self.tail = nn.Linear(width, width)
            self.tail.weight = self.head.weight
        if kind.frozen:
            self.blocks[1].requires_grad_(False)
        self._tied = kind.tied

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            values = block(values)
        values = self.head(values.to(self.head.weight.dtype)) * self.gain
        return self.tail(values) if self._tied else values


def sharded(kind: Kind) -> nn.Module:
    """A model with the same weights on all ranks, one unit for each block and one for the rest."""
    torch.manual_seed(0)
    experts = _mesh(kind.expert_ranks, "experts") if kind.expert_ranks > 1 else None
    model = Net(kind, experts["experts"] if experts is not None else None)
    given_back = torch.float32 if kind.hooks else None
    policy = MixedPrecisionPolicy(kind.param_dtype, kind.reduce_dtype, given_back)
    options: dict[str, Any] = {"mp_policy": policy}
    if kind.has == "exact gain":
        exact = {model.gain: torch.float32}
        options["mp_policy"] = replace(cast(Any, policy), param_dtype_override_fn=exact.get)
    for each in model.parameters() if kind.has == "any gradient" else ():
        each.grad_dtype = None
    if kind.replicas > 1 or kind.tensor_ranks > 1:  # Else each call makes a mesh of its own.
        mesh = _mesh(kind.tensor_ranks, "tensors", kind.replicas)
        options["mesh"] = mesh["copies", "parts"] if kind.replicas > 1 else mesh["parts"]
        if kind.tensor_ranks > 1:
            _split(model, mesh["tensors"])
    if experts is not None:
        options["mesh"] = init_device_mesh("cpu", (dist.get_world_size(),))
    shard: Any = fully_shard
    if kind.replicates:
        shard = importlib.import_module(
            "torch.distributed._composable.replicate_with_fsdp"
        ).replicate
    if kind.offloads:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for at, block in enumerate(model.blocks):
        if kind.checkpoints:
            model.blocks[at] = block = checkpoint_wrapper(block)
        if kind.compiles == "blocks":
            block.compile(backend="eager")
        kept: dict[str, Any] = {}
        if kind.user_keeps or kind.ranks_after_forward:
            kept["reshard_after_forward"] = False if kind.user_keeps else kind.ranks_after_forward
        if experts is not None and kind.experts_share:
            kept["shard_placement_fn"] = partial(_placed, FSDPMeshInfo(experts["parts"], 0))
        elif experts is not None:
            for inner in cast(Any, block)[2:]:  # Also of what recomputes it.
                fully_shard(inner, **{**options, "mesh": experts["parts"]})
        shard(block, **options, **kept)
    if kind.ignores:
        options["ignored_params"] = {model.gain}
    shard(model, **options)
    _set_newer(model, kind)
    for block in model.blocks if kind.hooks else ():
        block.register_forward_pre_hook(_exact_inputs, prepend=True)
        block.register_forward_hook(_exact_outputs)
    if kind.reduces_from == 0:
        _reduce_by_hand(model)
    if kind.compiles == "model":
        model.compile(backend="eager")
    return model


def _mesh(ranks: int, name: str, copies: int = 1) -> DeviceMesh:
    shape = copies, dist.get_world_size() // ranks // copies, ranks
    return init_device_mesh("cpu", shape, mesh_dim_names=("copies", "parts", name))


def _split(model: Net, mesh: DeviceMesh) -> None:
    """By tensor parallelism."""
    for at, block in enumerate(model.blocks):
        by_column = ColwiseParallel(output_layouts=Replicate())
        by_row = RowwiseParallel(input_layouts=Replicate())
        parallelize_module(block, mesh, {"0": by_row if at % 2 else by_column})


def _placed(experts: Any, parameter: nn.Parameter) -> Any:
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult

    return ShardPlacementResult(Shard(0), experts) if isinstance(parameter, DTensor) else None


def _set_newer(model: Any, kind: Kind) -> None:
    if kind.has == "own scatter group":
        model.set_separate_reduce_scatter_group(True)
    if kind.has == "kept storage":
        model.set_keep_unsharded_storage(True)


def _exact_inputs(_: nn.Module, inputs: Any) -> Any:
    """Torch's own hook, which comes next, rounds what this gives."""
    return (inputs[0].float() * 1.1,)


def _exact_outputs(_: nn.Module, __: Any, outputs: torch.Tensor) -> torch.Tensor:
    """Torch's own hook, which came before, has made them whole again."""
    return outputs * 1.01


class _Remembers:
    """Reduces one unit, and adds what was left over in the step before. It is no subclass of
    torch's: releases before 2.9 have none."""

    def __init__(self) -> None:
        self._left: torch.Tensor | None = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        whole = input_tensor if self._left is None else input_tensor + self._left
        rough = whole.bfloat16().float()
        self._left = whole - rough
        dist.reduce_scatter_tensor(output_tensor, rough, group=group)
        output_tensor.div_(dist.get_world_size(group))


def _reduce_by_hand(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(cast(Any, _Remembers()))


def train(
    model: Any, kind: Kind, changes: Changes, steps: int, optimizer: Any = None, first: int = 0
) -> tuple[list[float], Any]:
    """The losses of the steps from ``first`` to before ``steps``, and the optimizer."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    if kind.ends_itself:
        model.set_manual_backward_finalization(True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**121, growth_interval=3)
    scaler = scaler if kind.scales else torch.amp.GradScaler("cpu", enabled=False)
    for step in range(first, steps):
        if changes and step == 1:
            tunable_of(model)  # It looks at the steps from here on.
        if step in changes:
            tunable = tunable_of(model)
            assert model.reconfigure(replace(tunable.default, **possible(changes[step], tunable)))
        if kind.divides_from and step == kind.divides_from:
            _divide_by_3(model)
        if step == kind.calls_from > 0:
            _call_newer_methods(model)
        if step == kind.reduces_from > 0:
            _reduce_by_hand(model)
        if kind.freezes_from and step in (kind.freezes_from, kind.freezes_from + 2):
            model.blocks.requires_grad_(step != kind.freezes_from)
        parts = kind.micro_batches[step % len(kind.micro_batches)]
        for part in range(parts):
            torch.manual_seed(1000 * step + 10 * part + dist.get_rank() // kind.tensor_ranks)
            is_last = part == parts - 1 or step < kind.awaits_from
            _say_if_last(model, kind, is_last)
            if kind.tells == "torch's":
                model.set_is_last_backward(part == parts - 1)
            elif kind.tells and isinstance(model, ShardedModel):
                model.report_last_micro_batch(part == parts - 1)
            loss = model(torch.randn(5, kind.width)).square().mean()
            scaler.scale(1000 * loss if kind.scales else loss).backward()
            losses.append(loss.item())
            if kind.ends_itself and (is_last or not kind.awaits):
                model.finalize_backward()
            if part < parts - 1 and step >= kind.amid_from:
                losses += _amid(model, optimizer, kind)
        losses += _between(model, kind)
        if kind.scales:
            losses.append(scaler.get_scale())
            scaler.unscale_(optimizer)
        if kind.clips:
            # Torch takes but parameters that are all split in the same way.
            clipped = model.blocks if kind.tensor_ranks > 1 else model
            losses.append(_full(nn.utils.clip_grad_norm_(clipped.parameters(), 0.05)).item())
        if kind.skips and step % kind.skips == 0:
            optimizer.zero_grad()
            continue
        if kind.between == "no optimizer":
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:  # Torch has those of the root gathered.
                        parameter.sub_(parameter.grad, alpha=0.1)
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        if kind.between == "evaluation after step":
            losses += _evaluated(model, kind)
    return losses, optimizer


def _say_if_last(model: Any, kind: Kind, is_last: bool) -> None:
    if kind.awaits == "all-reduce":
        model.set_requires_all_reduce(is_last)
    if kind.awaits in ("", "all-reduce"):
        return
    model.set_requires_gradient_sync(is_last)
    if kind.awaits == "reshard":
        model.set_reshard_after_backward(is_last)


def _divide_by_3(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # All that gloo has.
            module.set_gradient_divide_factor(3.0)


def _call_newer_methods(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_allocate_memory_from_process_group_for_comm(True)
    if hasattr(model, "set_reduce_scatter_unused_params"):
        model.set_reduce_scatter_unused_params(True)


def possible(changes: Mapping[str, Any], tunable: TunableUnits) -> dict[str, Any]:
    """The changes that there are units for, and that this release of torch has names for."""
    found = dict(changes)
    if len({spec.group for spec in tunable.tensors}) == len(tunable.tensors):
        found.pop("bucket_bytes", None)
    if not tunable.units[0].has_scatter_buffers:
        found.pop("scatter_buffers", None)
    if not tunable.units[0].is_replaceable:
        for knob in ("channels", "scatter_group"):
            found.pop(knob, None)
    return found


def _amid(model: Any, optimizer: Any, kind: Kind) -> list[float]:
    inputs = torch.ones(2, kind.width)
    if kind.amid == "evaluation":
        return _evaluated(model, kind)
    if kind.amid == "error":
        with pytest.raises(RuntimeError):
            model(torch.ones(2, kind.width + 1))
    if kind.amid == "error in backward":
        loss = model(inputs).sum()
        loss.register_hook(_fails)
        with pytest.raises(ArithmeticError):
            loss.backward()
    if kind.amid == "checkpoint":
        return [value.sum().item() for value in state_of(model).values()]
    if kind.amid == "block alone":
        with torch.no_grad():
            return [model.blocks[2](inputs).sum().item()]
    if kind.amid == "weights written":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)
    if kind.amid == "data written":
        for parameter in model.parameters():
            parameter.data.mul_(0.99)
    if kind.amid == "step":
        optimizer.step()
    if kind.amid in ("thrown away", "zeroed"):
        optimizer.zero_grad(set_to_none=kind.amid == "thrown away")
    if kind.amid == "clipped":
        return [_full(nn.utils.clip_grad_norm_(model.parameters(), 0.05)).item()]
    return []


def _fails(_: torch.Tensor) -> None:
    raise ArithmeticError


def _full(value: Any) -> torch.Tensor:
    found: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found


def _between(model: Any, kind: Kind) -> list[float]:
    inputs = torch.ones(2, kind.width)
    if kind.between == "evaluation":
        return _evaluated(model, kind)
    if kind.between in ("dropped graph", "no optimizer"):
        return [model(inputs).sum().item()]
    return []


def _evaluated(model: Any, kind: Kind) -> list[float]:
    model.eval()
    with torch.no_grad():
        found = [model(torch.ones(2, kind.width)).sum().item() for _ in range(2)]
    model.train()
    return found


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: _full(value).clone() for name, value in model.state_dict().items()}


def differs(kind: Kind, changes: Changes, steps: int = 10, beside: Kind | None = None) -> str:
    """What differs between an untouched model and ours; empty: nothing. Called on all ranks.

    Args:
        beside: how the untouched one is trained, if otherwise.
    """
    # Small, so that these small models travel in stripes, too.
    with mock.patch.multiple(link, SMALLEST_STRIPE_BYTES=16, ALIGNED_ELEMENTS=2):
        beside = beside or kind
        untouched = sharded(beside)
        expected, _ = train(untouched, beside, {}, steps)
        ours = bagua_client.tune(sharded(kind))
        found, _ = train(ours, kind, changes, steps)
    if found != expected:
        return f"other losses: {found} instead of {expected}"
    one, other = state_of(untouched), state_of(ours)
    if list(one) != list(other):
        return f"other names: {list(other)}"
    return ", ".join(name for name in one if not torch.equal(one[name], other[name]))

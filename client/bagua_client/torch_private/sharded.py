"""Models that ``fully_shard`` shards: their units, and what is set on them.

Public methods of ``FSDPModule`` set most of it and give none of it back, so what a training has set
is read here. A unit is the parameters of one ``fully_shard`` call, which communicate as one.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from bagua_client.torch_private.reducer import after_backward, is_in_backward

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule as FSDPModule

FOLDER = "torch.distributed.fsdp._fully_shard."
"""Where torch's own objects that communicate are defined."""


def is_sharded(module: object) -> bool:
    """Whether ``fully_shard`` was called on a module; imports nothing."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def can_be_set() -> bool:
    """Whether this torch lets a live model's units be kept gathered (since 2.8)."""
    from torch.distributed.fsdp import FSDPModule

    return hasattr(FSDPModule, "set_reshard_after_forward")


@dataclass(frozen=True)
class Given:
    """What the training has set on a unit.

    Attributes:
        mesh_kept: between which ranks its parameters stay spread after forward; None: each rank
            keeps all of them, gathered.
        forward, backward: the units that it gathers ahead; empty: as torch does it.
        gather, scatter: the objects that communicate; None: torch has none (before 2.9).
        copies: the process group that gradients are summed on over the copies of the model (HSDP);
            None: there is one copy.
    """

    mesh_kept: Any
    forward: Sequence[Any]
    backward: Sequence[Any]
    gather: Any
    scatter: Any
    copies: Any


class Unit:
    """Parameters that are gathered together, and whose gradients are reduced together.

    Attributes:
        name: of its module in the model; empty: the model itself.
        module: on which it is set what becomes of the unit.
        group, state: torch's own objects of the parameters and of the module.
        parameters: its parts on this rank, as the optimizer has them.
        elements: the number of elements of all of its parameters, gathered; where something else
            has split these before, as tensor parallelism does, those of the rank that has most.
        dtypes: what its parameters are gathered in, and what its gradients are reduced in; of
            several (since torch 2.15) the widest.
        device: that it computes on.
        is_trained: whether some of its parameters get gradients.
        given: what the training has set.
    """

    def __init__(self, name: str, module: FSDPModule, group: Any) -> None:
        self.name = name
        self.module = module
        self.group = group
        self.state: Any = module._get_fsdp_state()
        self.parameters: list[torch.nn.Parameter] = [p.sharded_param for p in group.fsdp_params]
        self.elements = sum(map(_gathered_elements, group.fsdp_params))
        gathered, reduced = zip(*map(_dtypes_of, group.fsdp_params), strict=True)
        self.dtypes: tuple[torch.dtype, torch.dtype] = (_widest(gathered), _widest(reduced))
        self.device: torch.device = group.device
        self.is_trained = any(parameter.requires_grad for parameter in self.parameters)
        self.given = Given(
            group.post_forward_mesh_info,
            self.state._states_to_forward_prefetch,
            self.state._states_to_backward_prefetch,
            getattr(group, "_all_gather_comm", None),
            getattr(group, "_reduce_scatter_comm", None),
            getattr(group.mesh_info, "replicate_process_group", None),
        )
        # By the names of what is given, what ours has put in its place.
        self._put = dict(vars(self.given))
        self._is_hidden = False
        self._reduces: Callable[[], object] | None = None
        self._stays: Callable[[bool], bool] | None = None
        self._defers: Callable[[], str] | None = None
        self._unreduced: list[tuple[Any, torch.Tensor, tuple[int, int]]] = []
        self._summed: set[int] = set()  # The parameters of what waits for other copies' sums.

    @property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        """Those that were given to its ``fully_shard`` call; of merged units those of all."""
        return tuple(self.state._modules)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that its parts are spread over, with this one. Where each rank has a
        copy of its own (``replicate_with_fsdp``), this one alone."""
        return self._ranks_along(self.group.mesh_info.shard_mesh_dim)

    @property
    def ranks_of_copies(self) -> tuple[int, ...]:
        """The global ranks that have the same parts of other copies of the model (HSDP), with this
        one."""
        return self._ranks_along(getattr(self.group.mesh_info, "replicate_mesh_dim", None))

    def _ranks_along(self, dim: int | None) -> tuple[int, ...]:
        mesh = self.group.mesh_info.mesh
        if dim is None:
            return (dist.get_rank(),)
        at: list[Any] = list(mesh.get_coordinate())
        at[dim] = slice(None)
        return tuple(sorted(mesh.mesh[tuple(at)].tolist()))

    @property
    def all_ranks(self) -> frozenset[int]:
        """The global ranks that have parts or copies of its parameters, also where something else
        than ``fully_shard`` has split them, if they say so by their mesh (``DTensor``)."""
        parts: Sequence[Any] = self.parameters
        meshes: list[DeviceMesh] = [each.device_mesh for each in parts]
        return frozenset(rank for mesh in meshes for rank in mesh.mesh.flatten().tolist())

    @property
    def travels(self) -> bool:
        """Whether it is gathered at all, which what a single rank has as a whole is not; or reduced
        over the copies of a model of which each rank holds all."""
        return len(self.ranks) > 1 or (self.is_whole and len(self.ranks_of_copies) > 1)

    @property
    def is_gathered_twice(self) -> bool:
        """Whether it is gathered for the forward pass, and for the backward pass again, by what the
        training has set."""
        return self.travels and self.given.mesh_kept is not None

    @property
    def is_first_of_module(self) -> bool:
        """Whether it has the first of its module's meshes."""
        return self.group is _groups_of(self.state)[0]

    @property
    def shares_its_state(self) -> bool:
        """Whether its module's other parameters are spread over other ranks, by the same call."""
        return len(_groups_of(self.state)) > 1

    @property
    def own_group(self) -> dist.ProcessGroup:
        """Torch's group of the ranks that its parts are spread over, whether or not they are spread
        over fewer now; of those that hold it where each has all of it."""
        info = self.group.mesh_info
        group: dist.ProcessGroup
        group = self.given.copies if self.is_whole else info.shard_process_group
        return group

    @property
    def is_whole(self) -> bool:
        """Whether each rank holds all of it (``replicate``): nothing is gathered, and gradients are
        summed over the copies alone."""
        return not hasattr(self.group.mesh_info, "shard_process_group")

    @property
    def is_idle(self) -> bool:
        """Whether it is in no forward or backward pass."""
        return bool(self.group._training_state.name == "IDLE")

    @property
    def is_gathered(self) -> bool:
        return bool(self.group.is_unsharded)

    @property
    def is_spread_narrowly(self) -> bool:
        """Whether it is spread over fewer ranks since a forward pass (``reshard_after_forward=2``)
        that no backward pass followed."""
        return bool(self.group.is_sharded_post_forward)

    @property
    def is_hidden(self) -> bool:
        """Whether a forward pass left it gathered or spread narrowly because of our settings, and
        its modules have the parameters that the optimizer has."""
        return self._is_hidden and not self.group.is_sharded

    @property
    def is_on_its_way(self) -> bool:
        """Whether it is being gathered ahead of a pass that has not begun."""
        return self.group._all_gather_result is not None

    def reshard(self) -> None:
        """Let go of what is gathered, or on its way."""
        if self.is_on_its_way:
            self.group.wait_for_unshard()
        self.group.reshard()

    @property
    def reshards_after_backward(self) -> bool:
        return bool(self.group.reshard_after_backward)

    @property
    def sums_wholly(self) -> bool:
        """Whether its gradients are reduced over all ranks now, and not for this copy of the model
        alone, as in all but the last backward passes of a step (``set_requires_all_reduce``)."""
        return self.given.copies is None or bool(self.group.all_reduce_grads)

    @property
    def is_replaceable(self) -> bool:
        """Whether other objects may communicate it (since torch 2.9)."""
        return self.given.gather is not None

    @property
    def carries_itself(self) -> bool:
        """Whether torch's own objects communicate it, as any others may."""
        kinds = type(self.given.gather), type(self.given.scatter)
        return not self.is_symmetric and all(kind.__module__.startswith(FOLDER) for kind in kinds)

    @property
    def is_symmetric(self) -> bool:
        """Whether the training has it communicate from symmetric memory
        (``set_symm_mem_for_comm``), of which only torch's own objects know."""
        kinds = type(self.given.gather), type(self.given.scatter)
        return any(kind.__name__.startswith("SymmMem") for kind in kinds)

    @property
    def may_be_spread(self) -> bool:
        """Whether its parameters may stay spread over other ranks from forward to backward: torch
        cannot do so with those that are spread by something else besides."""
        own = self.given.mesh_kept
        is_whole = own is not None and own.shard_mesh_size == self.group.mesh_info.shard_mesh_size
        return is_whole and not any(each.is_dtensor for each in self.group.fsdp_params)

    def keep(
        self,
        is_kept: bool,
        nodes: Any,
        is_training: Callable[[], bool],
        stays: Callable[[bool], bool] | None = None,
        defers: Callable[[], str] | None = None,
    ) -> None:
        """Keep its parameters gathered from forward to backward; else spread over each of these
        nodes; else what the training set.

        Args:
            nodes: from :func:`spread_over`; None: none.
            is_training: whether a forward pass of the whole model is under way that a backward
                pass may follow.
            stays: whether what is gathered from forward to backward stays so after the backward
                pass that comes to it now, given whether its gradients are reduced in that pass;
                None: it never does.
            defers: what the backward pass that comes to it now leaves to a later one: ``on``, all
                of the reduction; ``copies``, the sum over the copies of the model; empty: nothing.
        """
        self._note(mesh_kept=self.group.post_forward_mesh_info)
        own = self.given.mesh_kept
        spread = own if nodes is None or not self.may_be_spread else nodes
        kept_as = None if is_kept else spread
        self._put["mesh_kept"] = self.group.post_forward_mesh_info = kept_as
        for each in self.group.fsdp_params if own is not None else ():
            if each.post_forward_mesh_info != spread:
                each.post_forward_mesh_info = spread
                whole = torch.empty(each._orig_size, device="meta")
                each._init_sharded_post_forward_param_metadata(whole)
        for name in ("unshard", "post_forward"):
            self.group.__dict__.pop(name, None)
        self._stays = stays if kept_as is None else None
        self._defers = defers
        self._replace_backward()
        if kept_as is not own or self._stays is not None:
            self._hide_what_is_kept(is_training, kept_as is not own)

    def _note(self, **now: Any) -> None:
        """Take what is there now, and ours has not put there, as set by the training since. Torch
        never changes such a list in place, it puts another one there."""
        since = {name: value for name, value in now.items() if value is not self._put[name]}
        self.given = replace(self.given, **since)

    def _hide_what_is_kept(self, is_training: Callable[[], bool], after_forward: bool) -> None:
        """Let its modules have the parameters that the optimizer has wherever they would without
        our settings, between forward and backward, too: what a training reads or freezes there is
        theirs. Without gradients there is nothing to keep them for. A block that is called by
        itself is gathered anew, as without ours: its weights may be others by then."""
        group, unshard, post_forward = self.group, self.group.unshard, self.group.post_forward

        def shown(async_op: bool = False) -> None:
            if self.is_hidden and not is_in_backward() and not is_training():
                group._to_sharded()
            elif group.is_unsharded:
                for each in group.fsdp_params:
                    is_trained = each.sharded_param.requires_grad
                    if each._unsharded_param.requires_grad != is_trained:
                        each._unsharded_param.requires_grad_(is_trained)
                    each._setattr_on_modules(each._unsharded_param)
            self._is_hidden = False
            unshard(async_op)

        def hidden(module: Any, arguments: Any, output: Any) -> Any:
            output = post_forward(module, arguments, output)
            if is_in_backward():  # A checkpoint computes the forward pass again.
                return output
            if not torch.is_grad_enabled() and not is_training():
                group.reshard()
            self._show_own()
            return output

        group.unshard = shown
        if after_forward:
            group.post_forward = hidden

    def prefetch(self, ahead: tuple[Sequence[Unit], Sequence[Unit]] | None = None) -> None:
        """Gather these ahead, in a forward and in a backward pass; None: what the training set."""
        state = self.state
        self._note(
            forward=state._states_to_forward_prefetch, backward=state._states_to_backward_prefetch
        )
        if ahead is None:
            forward, backward = list(self.given.forward), list(self.given.backward)
        else:
            forward, backward = ([unit.state for unit in units] for units in ahead)
        self._put |= {"forward": forward, "backward": backward}
        state._states_to_forward_prefetch, state._states_to_backward_prefetch = forward, backward

    def communicate_by(self, gather: Any, scatter: Any, copies: Any) -> None:
        """Have these objects communicate it; ``copies`` only where there are several."""
        self._put |= {"gather": gather, "scatter": scatter}
        self.group._all_gather_comm, self.group._reduce_scatter_comm = gather, scatter
        if self.given.copies is not None:
            self.group.mesh_info.replicate_process_group = copies

    def objects_given(self) -> Given:
        """What is given, with the objects that the training has set to communicate it since."""
        self._note(gather=self.group._all_gather_comm, scatter=self.group._reduce_scatter_comm)
        return self.given

    @property
    def sums_by_itself(self) -> bool:
        """Whether a process group of torch's sums over the copies of the model."""
        return type(self.given.copies) is dist.ProcessGroup

    def when_used(self, used: Callable[[], object] | None) -> None:
        """Call this where a forward pass begins to use it."""
        group = self.group
        group.__dict__.pop("pre_forward", None)
        if used is None:
            return
        torchs = group.pre_forward

        def pre_forward(*arguments: Any) -> Any:
            # Of several modules that make one unit the first alone begins.
            if group._training_state.name != "FORWARD" and not is_in_backward():
                used()
            return torchs(*arguments)

        group.pre_forward = pre_forward

    def tell(self, reduces: Callable[[], object] | None) -> None:
        """Call this before its gradients are reduced; for where no other object may communicate."""
        self._reduces = reduces
        self._replace_backward()

    def _replace_backward(self) -> None:
        """What stays gathered then has its modules show the parameters that the optimizer has, as
        those have the gradients that a training clips."""
        group, reduces, stays, defers = self.group, self._reduces, self._stays, self._defers
        group.__dict__.pop("pre_backward", None)
        group.__dict__.pop("post_backward", None)
        if reduces is None and stays is None and defers is None:
            return
        begins, torchs = group.pre_backward, group.post_backward

        def left_to_later() -> str:
            # Where the training itself ends its passes, torch takes no gradients that wait.
            may_wait = group.reduce_grads and not self.is_ended_by_hand
            return defers() if defers is not None and may_wait else ""

        def begin_anew() -> None:
            # What has begun already has gradients of its own.
            if group._training_state.name != "PRE_BACKWARD":
                self.drop_what_was_thrown_away()

        def pre_backward(*arguments: Any) -> None:
            begin_anew()
            # Since torch 2.15 gradients are made in another dtype where they are not reduced.
            with _set(group, {"reduce_grads": False} if left_to_later() == "on" else {}):
                begins(*arguments)

        def post_backward(*unused: Any) -> None:
            begin_anew()
            later = left_to_later()
            is_reduced = bool(group.reduce_grads) and later != "on"
            if reduces is not None and is_reduced:
                reduces()
            put = {"all_reduce_grads": False} if later else {}
            if later == "on":
                put["reduce_grads"] = False
            if stays is not None and group.reshard_after_backward and stays(is_reduced):
                put["reshard_after_backward"] = False
            if later:
                self._summed = {id(each) for each in self._with_unreduced()}
            with _set(group, put):
                torchs(*unused)
            if group.is_unsharded and "reshard_after_backward" in put:
                self._show_own()
            self.leave_unreduced(bool(later))

        if defers is not None:
            group.pre_backward = pre_backward
        group.post_backward = post_backward

    def leave_unreduced(self, waits: bool) -> None:
        """Have gradients wait to be reduced, if there are some, or none of them. Each parameter has
        a gradient of zeros meanwhile, to which it is added later: what a training does to that says
        whether it throws the gradient away."""
        found = []
        for each in self._with_unreduced() if waits else ():
            parameter = each.sharded_param
            if parameter.grad is None:
                # The training may have said in what its gradients are held (since torch 2.15).
                held = getattr(each, "sharded_grad_dtype", None) or parameter.dtype
                zeros = torch.zeros_like(parameter._local_tensor, dtype=held)
                parameter.grad = each.to_sharded_dtensor(zeros)
            found.append((each, parameter.grad, _versions(parameter.grad)))
        self._unreduced = found

    def _with_unreduced(self) -> list[Any]:
        known = [each for each in self.group.fsdp_params if hasattr(each, "_unsharded_param")]
        summed = self._summed if self._has_partial_sums else set()
        return [each for each in known if id(each) in summed or _has_gradient(each)]

    def drop_what_was_thrown_away(self) -> None:
        """Forget gradients that wait to be reduced if the training has thrown them away; sums that
        wait for those of other copies, which are of the whole unit, if all were."""
        kept = []
        for each, grad, versions in self._unreduced:
            now = each.sharded_param.grad
            if now is grad and _versions(now) == versions:
                kept.append((each, grad, versions))
                continue
            each._unsharded_param.grad = None
            if each.unsharded_accumulated_grad is not None:  # Another one, before torch 2.15.
                each.unsharded_accumulated_grad = None
        if self._unreduced and not kept and self._has_partial_sums:
            self.group._partial_reduce_output = None
        self._unreduced = kept

    @property
    def _has_partial_sums(self) -> bool:
        """Whether sums wait for those of the other copies."""
        return getattr(self.group, "_partial_reduce_output", None) is not None

    @property
    def has_unreduced(self) -> bool:
        """Whether gradients wait to be reduced because of our settings."""
        return bool(self._unreduced)

    def reduce_now(self) -> None:
        """Reduce what waits for it, outside of any pass. Collective."""
        group, self._unreduced = self.group, []
        for each in self._with_unreduced():
            if not _has_gradient(each):  # Torch sums up nothing where no gradient is new.
                each._unsharded_param.grad = torch.zeros_like(each._unsharded_param)
        type(group).post_backward(group)
        group._training_state = type(group._training_state).IDLE
        group.finalize_backward()
        # Older releases know of one unit on its way; since torch 2.15 it is not the group that
        # waits for the sums.
        context = group.comm_ctx
        states = getattr(context, "reduce_scatter_states", None)
        scattered = [context.reduce_scatter_state] if states is None else states
        self._await_sums(*(state.event for state in scattered if state is not None))
        if states is None:
            context.reduce_scatter_state = None
        else:
            states.clear()

    def _await_sums(self, *events: Any) -> None:
        """Have the current stream wait for these, and for what torch sums up on others of its own;
        of which each release notes the end in one of two places. On a CPU there are none."""
        group = self.group
        by_stream = getattr(group.comm_ctx, "_last_post_reduce_events", {}).values()
        own = getattr(group, "_post_reduce_event", None)
        for event in (*events, *by_stream, own):
            if event is not None:
                group.device_handle.current_stream().wait_event(event)

    def _show_own(self) -> None:
        """Let its modules have the parameters that the optimizer has, although it is gathered."""
        for each in self.group.fsdp_params:
            each._setattr_on_modules(each.sharded_param)
        self._is_hidden = True

    @property
    def is_last_backward(self) -> bool:
        """What the training said of the next backward pass (``set_is_last_backward``)."""
        return bool(self.state._state_ctx.is_last_backward)

    @property
    def is_ended_by_hand(self) -> bool:
        """Whether the training itself ends each backward pass (since torch 2.15)."""
        return _is_ended_by_hand(self.state)

    @property
    def gradients(self) -> list[torch.Tensor]:
        """This rank's parts of those of its parameters that have one. The current stream waits for
        what is summed up: after a pass that is said not to be the last, torch does not."""
        self._await_sums()
        held = [each.sharded_param.grad for each in self.group.fsdp_params]
        return [gradient._local_tensor for gradient in held if gradient is not None]

    @property
    def parts(self) -> list[torch.Tensor]:
        """This rank's parts of its parameters."""
        return [each.sharded_param._local_tensor for each in self.group.fsdp_params]

    @property
    def may_stay(self) -> bool:
        """Whether it may stay gathered after a backward pass."""
        return self._stays is not None

    @property
    def versions(self) -> list[tuple[int, int, int]]:
        """Other ones when its weights may be others, but for writes past torch's counting (to
        ``.data``)."""
        held = [each.sharded_param for each in self.group.fsdp_params]
        return [(*_versions(each), each._local_tensor.data_ptr()) for each in held]

    @property
    def has_scatter_buffers(self) -> bool:
        """Whether several units' gradients may be on their way at once (since torch 2.13)."""
        return hasattr(self.group.comm_ctx, "reduce_scatter_max_input_buffers")

    @property
    def scatter_buffers(self) -> int:
        return int(getattr(self.group.comm_ctx, "reduce_scatter_max_input_buffers", 1))

    @scatter_buffers.setter
    def scatter_buffers(self, count: int) -> None:
        # Of all units; the public setter has no effect after the first forward pass.
        self.group.comm_ctx.reduce_scatter_max_input_buffers = count


def _dtypes_of(parameter: Any) -> tuple[torch.dtype, torch.dtype]:
    """What one of torch's parameters is gathered in, and what its gradient is reduced in."""
    policy = parameter.mp_policy
    gathered = policy.param_dtype or parameter.sharded_param.dtype
    # Since torch 2.15 as the optimizer holds it, unless the training says otherwise.
    return gathered, getattr(parameter, "unsharded_grad_dtype", policy.reduce_dtype) or gathered


def _widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    return max(dtypes, key=lambda dtype: dtype.itemsize)


def _has_gradient(parameter: Any) -> bool:
    """Whether one waits, or was just made, that is not reduced."""
    held = parameter.unsharded_accumulated_grad, parameter._unsharded_param.grad
    return any(each is not None for each in held)


def _versions(spread: Any) -> tuple[int, int]:
    """Of a tensor that is spread over the ranks, and of this rank's part: an operation on the whole
    counts for the first only, one on the part for the second."""
    return (-1, -1) if spread is None else (spread._version, spread._local_tensor._version)


@contextmanager
def _set(group: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Have a group with these values inside the context."""
    own = {name: getattr(group, name) for name in values}
    vars(group).update(values)
    try:
        yield
    finally:
        vars(group).update(own)


def _is_ended_by_hand(state: Any) -> bool:
    return bool(getattr(state._state_ctx, "manual_backward_finalization", False))


def after_reductions(model: torch.nn.Module, callback: Callable[[], None]) -> None:
    """Call ``callback`` when all that a backward pass of this model reduces is reduced.

    A pipeline's stage reduces by hand what the backward passes of its micro-batches have left, and
    then says itself that they are over, as any training may since torch 2.15
    (``set_manual_backward_finalization``). Where that never happens, nor does the call.
    """
    own: Any = model
    state = own._get_fsdp_state()
    last = "_root_post_backward_final_callback"
    if _is_ended_by_hand(state):
        last = "_end_backward_iteration"
    elif is_in_backward():
        after_backward(callback)
        return

    def ended(*arguments: Any) -> None:
        delattr(state, last)
        getattr(state, last)(*arguments)
        callback()

    setattr(state, last, ended)


def checksums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """(tensors,): two that differ are of different ones. Nobody waits for the device."""
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}
    sums = [
        each.detach().contiguous().view(integers.get(each.element_size(), torch.uint8)).sum()
        for each in tensors
    ]
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)


def spread_over(
    nodes: Sequence[Sequence[int]],
    inside: dist.ProcessGroup,
    across: dist.ProcessGroup,
    device: str,
) -> Any:
    """What :meth:`Unit.keep` takes.

    Args:
        nodes: the global ranks of each node.
        inside, across: this rank's process groups: of its node, and of its like on each node.
        device: the type of what the model computes on.
    """
    common: Any = importlib.import_module(f"{FOLDER}_fsdp_common")
    mesh = DeviceMesh.from_group(
        [across, inside], device, torch.tensor(nodes), mesh_dim_names=("nodes", "ranks")
    )
    return common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def _begin(root: torch.nn.Module) -> None:
    """Have torch do what it does in the first forward pass, and that changes what is set on the
    model itself. If it fails, torch fails in the same way when that pass comes."""
    modules: list[Any] = [module for module in root.modules() if is_sharded(module)]
    before = [(state := module._get_fsdp_state(), state._is_root) for module in modules]
    own: Any = root
    try:
        own._get_fsdp_state()._lazy_init()
    except Exception:
        for state, is_root in before:
            state._is_root = is_root
        own._get_fsdp_state()._state_ctx.all_states.clear()
        raise


def units_of(root: torch.nn.Module) -> list[Unit]:
    """The units of a model, in the order in which it lists its modules. Where a module's parameters
    are on several meshes, those of each are one."""
    _begin(root)
    found, seen = [], set()
    for name, module in root.named_modules():
        if not is_sharded(module):
            continue
        state: Any = module._get_fsdp_state()
        if id(state) in seen:
            continue
        seen.add(id(state))
        for place, group in enumerate(_groups_of(state)):
            if group.fsdp_params:
                of_mesh = f"{name or '(root)'} (mesh {place + 1})"
                found.append(Unit(of_mesh if place else name, module, group))
    return found


def _groups_of(state: Any) -> list[Any]:
    # Several since torch 2.12.
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _gathered_elements(parameter: Any) -> int:
    """Of one of torch's parameters; equal on all ranks."""
    names = "_unsharded_dtensor_spec", "_tp_spec"  # The second before torch 2.13 or so.
    spec = next((found for n in names if (found := getattr(parameter, n, None))), None)
    if spec is None:
        return math.prod(parameter._orig_size)
    sizes = list(spec.shape)
    for ranks, placement in zip(spec.mesh.shape, spec.placements, strict=True):
        if (dim := getattr(placement, "dim", None)) is not None:
            sizes[dim] = math.ceil(sizes[dim] / ranks)
    return math.prod(sizes)

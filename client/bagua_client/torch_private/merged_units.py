"""Units of a sharded model that communicate as one, merged and parted while the model trains.

A group of torch's only says which parameters are gathered and reduced together; each parameter is
sharded by itself. So parameters move between groups when every group is idle, and what each rank
holds, what the optimizer has and the names in a ``state_dict`` stay as they are. None of it has a
public name: units cannot be merged where torch lacks one of those that are used here.
"""

from __future__ import annotations

import importlib
import inspect
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

from bagua_client.torch_private.reducer import is_in_backward
from bagua_client.torch_private.sharded import FOLDER, Unit
from bagua_client.torch_private.wrapper import untraced

OWN_SETTINGS = (
    "gradient_divide_factor",
    "reduce_grads",
    "all_reduce_grads",
    "reshard_after_backward",
    "unshard_in_backward",
    "_all_reduce_hook",
    "_all_reduce_hook_stream",
    "unshard_async_op",
    "reduce_scatter_unused_params",
    "force_sum_reduction_for_comms",
)
"""What a training may set on a unit at any time, and units have to have in common."""


DTYPES = "_orig_dtype", "_reduce_dtype"
"""What torch takes from a group's parameters that are trained when a training begins."""
NEEDED = (
    *(f"group.{name}" for name in OWN_SETTINGS),
    "group.fsdp_params",
    "group.modules",
    "group.offload_policy",
    "group.post_forward_mesh_info",
    "group.lazy_init",
    "group.comm_ctx.post_forward_order",
    "group._post_forward_indices",
    "group._partial_reduce_output",
    "group._sharded_state",
    "group._module_to_pre_save_state_dict_hook_handle",
    "group._module_to_pre_load_state_dict_hook_handle",
    "group._training_state.IDLE",
    "group._to_sharded",
    "state._modules",
    "state._mp_policy.output_dtype",
    "state._fsdp_param_groups",
    "state._is_root",
    "state._training_state.IDLE",
    "state._pre_forward",
    "state._post_forward",
    "state._pre_forward_hook_handle",
    "state._post_forward_hook_handle",
    "state._modules_to_run_forward",
    "state._cast_output_dtype",
    "state._state_ctx.all_states",
    "state._state_ctx.iter_forward_root",
    # Ends what a pass used a part of only.
    "state._force_complete_incomplete_states",
)
"""What is used of a unit."""


def why_not(units: Sequence[Unit]) -> str:
    """Why these units cannot be merged, by what this torch lacks; empty: it lacks nothing."""
    lacks = f"torch {torch.__version__} lacks what this takes"
    for unit in units:
        for name in NEEDED:
            try:
                attrgetter(name)(unit)
            except AttributeError:
                return f"{lacks}: {name}"
    try:
        _owners()
        inspect.signature(_group_hooks()).bind(*range(5))
    except (ImportError, AttributeError):
        return f"{lacks}: modules with a state, and hooks of several modules"
    except TypeError:
        return f"{lacks}: hooks of several modules that take five arguments"
    return ""


def families(units: Sequence[Unit]) -> list[str]:
    """For each unit the name of those that it can be merged with: neighbours in one container, with
    the same mesh, precision and settings. Where none can be merged, each has a name of its own."""
    found: list[str] = []
    if why_not(units):
        return [unit.name for unit in units]
    for place, unit in enumerate(units):
        before = units[place - 1] if place else None
        if before is not None and before.name and _is_like(before, unit):
            found.append(found[-1])
        else:
            found.append(unit.name)
    return found


def _is_like(one: Unit, other: Unit) -> bool:
    if one.name.rpartition(".")[0] != other.name.rpartition(".")[0]:
        return False
    if not one.carries_itself:  # What the training's own objects know of a unit is its own.
        return False
    if one.shares_its_state or other.shares_its_state or not one.travels:
        return False
    # Of merged units that a pass uses in part, torch casts the model's output as theirs.
    output_dtype = one.state._mp_policy.output_dtype
    if output_dtype not in (None, _root_of(one)._mp_policy.output_dtype):
        return False
    return bool(_settings_of(one) == _settings_of(other))


def _root_of(unit: Unit) -> Any:
    return next(each for each in unit.state._state_ctx.all_states if each._is_root)


def _settings_of(unit: Unit) -> tuple[Any, ...]:
    group: Any = unit.group
    return (
        # Each call without a mesh makes one of its own, of the same ranks and groups.
        *(unit.dtypes, unit.is_trained, unit.device, unit.ranks, id(unit.own_group)),
        unit.ranks_of_copies,
        *(frozenset(map(_precision, group.fsdp_params)), unit.state._mp_policy),
        *(group.offload_policy, _ranks_after_forward(group)),
        *(type(unit.given.gather), type(unit.given.scatter), len(unit.state._modules)),
        *_own_settings(unit),
        # A hook of the training's may know a unit by its size.
        *([unit.name] if group._all_reduce_hook is not None else []),
    )


def _precision(parameter: Any) -> tuple[Any, ...]:
    """In what a parameter, and its gradient, is held and travels."""
    held = parameter.sharded_param.dtype
    # Where the training has said "any" (since torch 2.15), it depends on all that are reduced with
    # it.
    grad = getattr(parameter, "sharded_grad_dtype", held) or id(parameter)
    return parameter.mp_policy, held, grad


def _own_settings(unit: Unit) -> tuple[Any, ...]:
    return tuple(getattr(unit.group, name) for name in OWN_SETTINGS)


def _ranks_after_forward(group: Any) -> int:
    """Over how many ranks it is spread from forward to backward; 0: each has all of it."""
    info = group.post_forward_mesh_info
    return 0 if info is None else int(info.shard_mesh_size)


class MergedUnits:
    """The units of one model, and which of them are merged now.

    Args:
        units: of the model, in the order in which it lists them, the model's own first.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._parameters = [list(unit.group.fsdp_params) for unit in units]
        self._modules = [unit.modules for unit in units]
        self._dtypes = [
            {name: value for name, value in vars(unit.group).items() if name in DTYPES}
            for unit in units
        ]
        self._context: Any = units[0].state._state_ctx
        self._states = list(self._context.all_states)
        self._parts: list[tuple[int, ...]] = [(place,) for place in range(len(units))]

    @property
    def leading(self) -> list[tuple[Unit, tuple[int, ...]]]:
        """The units that communicate, each for the units at these places."""
        return [(self._units[part[0]], part) for part in self._parts]

    def merge(self, parts: Sequence[tuple[int, ...]]) -> None:
        """Have the units of each part communicate as one, by the first of them. Every unit must be
        idle, and no backward pass may be to come.

        Args:
            parts: of the units' places, each in ascending order; together all of them.

        Raises:
            RuntimeError: gradients wait to be summed up over the copies of the model, or the
                training has set one thing on one unit of a part and another on another.
        """
        changed = {place for part in {*parts} ^ {*self._parts} for place in part}
        if not changed:
            return
        for unit in self._units:
            if unit.group._partial_reduce_output is not None:
                raise RuntimeError("gradients wait to be summed up over the copies of the model")
        before = [unit for unit, part in self.leading if not changed.isdisjoint(part)]
        if not all(unit.is_gathered for unit in before):
            for unit in before:
                # As after a call of its ``unshard``, or of that with ``async_op``.
                if unit.is_gathered or unit.is_on_its_way:
                    unit.reshard()
        kept_as = before[0].group._sharded_state
        self._give_back_settings()
        for part in parts:
            first, *others = (_own_settings(self._units[place]) for place in part)
            has_hook = len(part) > 1 and self._units[part[0]].group._all_reduce_hook is not None
            if has_hook or any(other != first for other in others):
                raise RuntimeError(
                    "the training has set different things, or a hook, on units to be merged"
                )
        hooks = [_OtherHooks(module) for place in changed for module in self._modules[place]]
        for place in changed:
            self._take_hooks(self._units[place])
        self._parts = list(parts)
        # Torch gathers ahead by the order of the last passes, in which there are other groups.
        self._units[0].group.comm_ctx.post_forward_order.clear()
        for unit in self._units:
            unit.group._post_forward_indices.clear()
        for part in parts:
            if part[0] in changed:
                self._join(part)
                self._units[part[0]].group._sharded_state = kept_as
        for each in hooks:
            each.put_back()
        absorbed = {id(self._units[place].state) for part in parts for place in part[1:]}
        self._context.all_states[:] = [s for s in self._states if id(s) not in absorbed]

    def _give_back_settings(self) -> None:
        """What the training has set meanwhile on merged units, their first one has."""
        for unit, part in self.leading:
            for place in part[1:]:
                for name, value in zip(OWN_SETTINGS, _own_settings(unit), strict=True):
                    setattr(self._units[place].group, name, value)

    def settle(self) -> None:
        """Let go of merged units of which a pass used a part only, and that ended with an error:
        torch waits for the others until the model's own pass ends."""
        for unit, part in self.leading:
            if len(part) > 1 and unit.state._modules_to_run_forward:
                unit.state._modules_to_run_forward.clear()
                if self._context.iter_forward_root is unit.state:
                    self._context.iter_forward_root = None
                for each in (unit.state, unit.group):
                    each._training_state = type(each._training_state).IDLE
                unit.group._to_sharded()

    def _take_hooks(self, unit: Unit) -> None:
        state, group = unit.state, unit.group
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        for handles in (
            group._module_to_pre_save_state_dict_hook_handle,
            group._module_to_pre_load_state_dict_hook_handle,
        ):
            for handle in handles.values():
                handle.remove()
            handles.clear()
        state._modules_to_run_forward.clear()

    def _join(self, part: Sequence[int]) -> None:
        first = self._units[part[0]]
        state, group = first.state, first.group
        modules = tuple(module for place in part for module in self._modules[place])
        group.fsdp_params = [each for place in part for each in self._parameters[place]]
        group.modules = state._modules = modules
        state._fsdp_param_groups = [group]
        for place in part[1:]:
            absorbed = self._units[place]
            absorbed.state._modules, absorbed.state._fsdp_param_groups = (), []
            absorbed.group.fsdp_params = []
        for module in modules:
            _owner_of(module, state)
        _hook(state)
        group.lazy_init()  # What torch derives from the parameters, as when a training begins.
        vars(group).update(self._dtypes[part[0]])


class _OtherHooks:
    """The training's own forward hooks of a module, which run before torch's that are taken away
    and made anew, or after them."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._before, self._after = list(module._forward_pre_hooks), list(module._forward_hooks)

    def put_back(self) -> None:
        """Have them run again where they ran."""
        module: Any = self._module
        first, last = module._forward_pre_hooks, module._forward_hooks
        gone = [place for place, each in enumerate(self._before) if each not in first]
        for each in reversed(self._before[: min(gone, default=0)]):
            first.move_to_end(each, last=False)
        gone = [place for place, each in enumerate(self._after) if each not in last]
        for each in self._after[max(gone, default=len(self._after)) + 1 :]:
            last.move_to_end(each)


def _owners() -> Any:
    """Torch's mapping from modules to their states."""
    return importlib.import_module("torch.distributed._composable_state")._module_state_mapping


def _group_hooks() -> Any:
    """Torch's function that registers the forward hooks of several modules of one unit."""
    return importlib.import_module(f"{FOLDER}_fsdp_state")._register_group_forward_hooks


def _owner_of(module: torch.nn.Module, state: Any) -> None:
    _owners()[module] = weakref.ref(state)


def _hook(state: Any) -> None:
    """As torch does it when ``fully_shard`` is called on one module, or on several."""
    if len(state._modules) == 1:
        (module,) = state._modules
        state._pre_forward_hook_handle = module.register_forward_pre_hook(
            state._pre_forward, prepend=True, with_kwargs=True
        )
        state._post_forward_hook_handle = module.register_forward_hook(state._post_forward)
        return
    handle = _group_hooks()(
        state._modules,
        state._pre_forward,
        state._post_forward,
        state._modules_to_run_forward,
        state._cast_output_dtype,
    )
    handles = [handle, *(each.register_forward_hook(_alone(state)) for each in state._modules)]
    state._pre_forward_hook_handle = state._post_forward_hook_handle = _Handles(handles)


def _alone(state: Any) -> Callable[..., Any]:
    """For a block of merged units that a training calls by itself, outside the model's forward
    pass: the others are not to come in this pass, which ends with this block."""

    @untraced
    def ended(module: torch.nn.Module, arguments: Any, output: Any) -> Any:
        is_alone = state._state_ctx.iter_forward_root is state and not is_in_backward()
        if not is_alone or not state._modules_to_run_forward:
            return output
        state._modules_to_run_forward.clear()
        return state._post_forward(module, arguments, output)

    return ended


class _Handles:
    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = handles

    def remove(self) -> None:
        for each in self._handles:
            each.remove()

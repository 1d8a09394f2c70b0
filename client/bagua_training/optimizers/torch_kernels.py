"""Torch's own kernels over many tensors at once, for those of its optimizers that have some.

``fused`` computes the whole step of many tensors in one kernel, ``foreach`` each operation of it.
Both need less time than long parameters do, so they are used where torch has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

TAKE_SPARSE_GRADIENTS = (torch.optim.SGD, torch.optim.Adagrad)
"""Classes that take sparse gradients, unless they are fused."""


def used_by(optimizer: Optimizer, by_default: bool) -> str:
    """Return which of torch's kernels step all its groups: ``fused`` or ``foreach``; empty: none
    do.

    Args:
        by_default: count what torch does where nobody has chosen: ``foreach`` on GPUs.
    """
    if _torch_class(optimizer) is None:
        return ""
    return min(_used(group, by_default) for group in optimizer.param_groups)


def _used(group: dict[str, Any], by_default: bool) -> str:
    if group.get("fused"):
        return "fused"
    # Who captures steps in a graph does not look for kernels of ours in it.
    is_left = (by_default or group.get("capturable")) and _is_left_to_torch(group)
    is_foreach = group.get("foreach") or ("foreach" in group and is_left)
    # On a CPU, foreach is the loop.
    is_on_cpu = any(parameter.device.type == "cpu" for parameter in group["params"])
    return "foreach" if is_foreach and not is_on_cpu else ""


def turn_on_fused(optimizer: Optimizer) -> None:
    """Set ``fused=True`` in the groups for which torch has such a kernel and nobody has chosen.

    It stays set when a state is loaded in which nobody has chosen either.
    """
    torch_class = _torch_class(optimizer)
    if torch_class is None or "fused" not in optimizer.defaults:
        return
    places = {
        place
        for place, group in enumerate(optimizer.param_groups)
        if _is_left_to_torch(group) and _has_fused(torch_class, group["params"])
    }

    def with_fused(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        groups = [
            {**group, "fused": True} if place in places and _is_left_to_torch(group) else group
            for place, group in enumerate(state["param_groups"])
        ]
        return {**state, "param_groups": groups}

    if places:
        optimizer.register_load_state_dict_pre_hook(with_fused)
        # Loading moves the counts of steps to where the kernels want them, too.
        optimizer.load_state_dict(optimizer.state_dict())
        if issubclass(torch_class, TAKE_SPARSE_GRADIENTS):
            optimizer.register_step_pre_hook(_turn_off_for_sparse)


def _turn_off_for_sparse(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        if group["fused"] and any(p.grad is not None and p.grad.is_sparse for p in group["params"]):
            group["fused"] = None


def _torch_class(optimizer: Optimizer) -> type[Optimizer] | None:
    """The class of torch's that its ``step`` is from; None if somebody else has written it."""
    found = next(each for each in type(optimizer).__mro__ if "step" in vars(each))
    return found if found.__module__.startswith("torch.optim.") else None


def _is_left_to_torch(group: dict[str, Any]) -> bool:
    choices = (group.get("fused"), group.get("foreach"), group.get("differentiable") or None)
    return choices == (None, None, None)


def _has_fused(torch_class: Any, parameters: Sequence[Parameter]) -> bool:
    """Whether torch has a fused kernel for these: it has no list, so we try one element."""
    for dtype, device in {(parameter.dtype, parameter.device) for parameter in parameters}:
        tried = Parameter(torch.zeros(1, dtype=dtype, device=device))
        tried.grad = torch.zeros_like(tried)
        try:
            torch_class([tried], fused=True).step()
        except (RuntimeError, TypeError):
            return False
    return True

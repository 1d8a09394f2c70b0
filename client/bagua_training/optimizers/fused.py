"""One step over many small tensors at once, for optimizers that loop over their parameters.

An optimizer written as a loop starts a few kernels for each tensor, and with hundreds of small
tensors the starting takes longer than the work. Where the tensors follow one another in memory,
they are one long tensor to every operation that works element by element; so the optimizer's own
``step`` is called on a copy of it that has that long tensor as its parameter. This is Bagua's idea.

It is right only for optimizers that look at each element by itself. Those that take a norm of each
tensor, as LAMB does, or depend on shapes would compute something else. So the code of an optimizer
is read, and it is left plain where that does not show what is needed; and a fused step of copies
is compared with a plain one in some of the first steps.

Torch's own kernels over many tensors at once, for those of its optimizers that have some, need less
time than long parameters do, so they are used where torch has them: ``fused`` computes the whole
step of many tensors in one kernel, ``foreach`` each operation of it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from functools import partial
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from bagua_client.torch_private.optimizer import mark_as_seen_by_schedulers, mark_as_stepped
from bagua_training.optimizers.fused_step import FusedStep, unread
from bagua_training.optimizers.reading import read
from bagua_training.optimizers.trial import Closure, known_loss, own_names, step_plainly

logger = logging.getLogger(__name__)

TAKE_SPARSE_GRADIENTS = (torch.optim.SGD, torch.optim.Adagrad)
"""Classes that take sparse gradients, unless they are fused."""
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def fuse_optimizer(
    optimizer: AnyOptimizer,
    do_flatten: bool = True,
    check_flatten: bool = True,
    replace_step: bool = False,
    element_wise: bool = False,
) -> AnyOptimizer:
    """Add ``fuse_step`` to an optimizer, which does what ``step`` does in fewer kernels.

    Args:
        do_flatten: move small weights and their states so that they follow one another. Otherwise
            only what does by itself is fused, gradients included.
        check_flatten: move them together again where somebody has moved them since.
        replace_step: ``step`` is ``fuse_step``, too: for who calls it in your place, such as
            ``torch.amp.GradScaler``, Lightning or Accelerate. Of torch's own optimizers it is
            torch's ``fused`` or ``foreach`` step, where there is one: those are faster.
        element_wise: you know that the optimizer treats each element by itself, in all of its
            steps. Otherwise its code has to show that, or its steps remain plain, and a warning
            says why.

    Returns:
        The same optimizer. Its ``state_dict`` is that of an unfused one; a copy of it, by
        ``copy.deepcopy`` or pickle, is fused with the same arguments.

    Raises:
        RuntimeError: it is fused already.
        ValueError: it cannot be: its ``step`` needs a closure, as LBFGS's does, or it is a wrapper
            around another optimizer.
    """
    if is_fused_optimizer(optimizer):
        raise RuntimeError("this optimizer is fused already")
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(f"{name} calls the closure itself, so nothing is fused")
    if any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
        raise ValueError(f"{name} wraps another optimizer: fuse that one before it is wrapped")
    if replace_step:
        _turn_on_fused(optimizer)
    used = _kernels_used_by(optimizer, by_default=replace_step)
    reading = None if used or element_wise else read(optimizer)
    is_read = reading is None or not reading.reason
    fused = FusedStep(optimizer, do_flatten and not used and is_read, check_flatten, reading)
    if reading is not None and reading.reason:
        fused.refusal = unread(optimizer, reading.reason)
        logger.warning(fused.refusal)
    if used:
        fused.refusal = f"{name} steps with torch's own {used} kernels, which are faster"
        logger.info(fused.refusal)
    options = {
        "do_flatten": do_flatten,
        "check_flatten": check_flatten,
        "replace_step": replace_step,
        "element_wise": element_wise,
    }
    _attach(optimizer, fused, options)
    if replace_step and not used:
        # A method, as learning rate schedulers wrap its function.
        cast(Any, optimizer).step = MethodType(_fuse_step, optimizer)
    return optimizer


def _attach(optimizer: Optimizer, fused: FusedStep, options: dict[str, bool]) -> None:
    """Add ``fuse_step`` to the optimizer, and what Bagua's own fused optimizers have."""
    found: Any = optimizer
    found._bagua_fused_step = fused
    found._bagua_fused_optimizer = fused.shadow
    found._bagua_fused_count = 0
    found._bagua_check_flatten = options["check_flatten"]
    found.fuse_step = MethodType(_fuse_step, optimizer)
    # Python looks for it in the object itself, for copies and for pickle.
    found.__reduce_ex__ = partial(_reduced, optimizer, options)


def _reduced(optimizer: Optimizer, options: dict[str, bool], protocol: Any) -> tuple[Any, ...]:
    """Return what a copy is made of: that of the plain optimizer, which is fused in the
    same way.
    """
    # Of its class: this very function is what the object itself has.
    plain: Any = type(optimizer).__reduce_ex__(optimizer, protocol)
    made, arguments, *rest = plain
    state = rest[0] if rest else None
    if isinstance(state, dict):
        state = {name: value for name, value in state.items() if name not in own_names(optimizer)}
    return _fused_again, (made, arguments, state, options)


def _fused_again(made: Any, arguments: Any, state: Any, options: dict[str, bool]) -> Optimizer:
    optimizer: Optimizer = made(*arguments)
    if state is not None:
        optimizer.__setstate__(state)
    return fuse_optimizer(optimizer, **options)


def is_fused_optimizer(optimizer: Optimizer) -> bool:
    """Whether :func:`fuse_optimizer` was called with it."""
    return hasattr(optimizer, "_bagua_fused_step")


@Optimizer.profile_hook_step
def _fuse_step(optimizer: Any, closure: Closure | None = None) -> Any:
    """One optimizer step, fused where that is possible.

    Args:
        closure: computes the loss and the gradients anew; called once.

    Returns:
        What the closure returns.
    """
    mark_as_stepped(optimizer)
    fused: FusedStep = optimizer._bagua_fused_step
    # Compiled, the kernels of a plain step are joined by the compiler.
    if fused.refusal or torch.compiler.is_compiling():
        return step_plainly(optimizer, closure)
    if closure is None:
        loss, known = None, None
    else:
        with torch.enable_grad():
            loss = closure()
        known = known_loss(optimizer, loss, closure)
    optimizer._bagua_fused_count += fused(known)
    return step_plainly(optimizer, known) if fused.refusal else loss


mark_as_seen_by_schedulers(_fuse_step)


def _kernels_used_by(optimizer: Optimizer, by_default: bool) -> str:
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


def _turn_on_fused(optimizer: Optimizer) -> None:
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

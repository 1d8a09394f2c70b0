"""One step over many small tensors at once, for optimizers that loop over their parameters.

An optimizer written as a loop starts a few kernels for each tensor, and with hundreds of small
tensors the starting takes longer than the work. Where the tensors follow one another in memory,
they are one long tensor to every operation that works element by element; so the optimizer's own
``step`` is called on a copy of it that has that long tensor as its parameter. This is Bagua's idea.

It is right only for optimizers that look at each element by itself. Those that take a norm of each
tensor, as LAMB does, or depend on shapes would compute something else. So the code of an optimizer
is read, and it is left plain where that does not show what is needed; and a fused step of copies
is compared with a plain one in some of the first steps.
"""

from __future__ import annotations

import inspect
import logging
from functools import partial
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch.optim import Optimizer

from bagua_client.torch_private.optimizer import mark_as_seen_by_schedulers, mark_as_stepped
from bagua_training.optimizers import torch_kernels
from bagua_training.optimizers.fused_step import FusedStep, unread
from bagua_training.optimizers.reading import read
from bagua_training.optimizers.trial import Closure, known_loss, own_names, step_plainly

logger = logging.getLogger(__name__)

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
        torch_kernels.turn_on_fused(optimizer)
    used = torch_kernels.used_by(optimizer, by_default=replace_step)
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

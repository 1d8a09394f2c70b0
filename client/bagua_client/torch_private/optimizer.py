"""What torch has put around the step of an optimizer: hooks, and marks of its schedulers."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from bagua_client.torch_private.wrapper import called_untraced

HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def at_each_step(method: Callable[[Optimizer], object], is_before: bool = False) -> RemovableHandle:
    """Call a method after each step of any optimizer, or before it, while its object is there."""
    find = weakref.WeakMethod(method)

    def steps(optimizer: Optimizer, *_: Any) -> None:
        if (found := find()) is not None:
            found(optimizer)

    register = register_optimizer_step_pre_hook if is_before else register_optimizer_step_post_hook
    return register(called_untraced(steps))


_unscalings: OrderedDict[int, weakref.WeakMethod[Callable[[Optimizer], object]]] = OrderedDict()


def before_each_unscaling(method: Callable[[Optimizer], object]) -> RemovableHandle:
    """Call a method before a ``GradScaler`` looks at an optimizer's gradients, which it does for
    fused optimizers too, while its object is there."""
    unscale = torch.amp.GradScaler._unscale_grads_
    if not hasattr(unscale, "is_ours"):

        @functools.wraps(unscale)
        def unscales(scaler: Any, optimizer: Optimizer, *rest: Any) -> Any:
            for find in [*_unscalings.values()]:
                if (found := find()) is not None:
                    called_untraced(found)(optimizer)
            return unscale(scaler, optimizer, *rest)

        unscales.is_ours = True  # type: ignore[attr-defined]
        torch.amp.GradScaler._unscale_grads_ = unscales  # type: ignore[method-assign, assignment]
    handle = RemovableHandle(_unscalings)
    _unscalings[handle.id] = weakref.WeakMethod(method)
    return handle


def unhooked_step(optimizer: type[Optimizer]) -> Callable[..., Any]:
    """The step of a class as it was written; torch wraps it, and calls all hooks there."""
    step: Any = optimizer.step
    plain: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return plain


def step_is_compiled(optimizer: Optimizer) -> bool:
    """Whether the training has put what ``torch.compile`` made in the place of its step."""
    return hasattr(vars(optimizer).get("step"), "_torchdynamo_orig_callable")


def clear_step_hooks(optimizer: Optimizer) -> None:
    """Give a copied optimizer empty dictionaries of hooks, not those of the original. Torch has no
    list of hooks to remove them by.
    """
    for name in HOOKS:
        setattr(optimizer, name, OrderedDict())


def is_torchs(name: str) -> bool:
    """Whether an attribute of this name is torch's own bookkeeping in an optimizer."""
    return name.startswith("_optimizer_") or name == "_opt_called"


def mark_as_seen_by_schedulers(step: Callable[..., Any]) -> None:
    """Schedulers warn of a step that they have not wrapped, and wrap one without this mark."""
    vars(step)["_wrapped_by_lr_sched"] = True


def mark_as_stepped(optimizer: Any) -> None:
    """Mark the optimizer as stepped, as a scheduler's wrapper does: else the scheduler warns."""
    optimizer._opt_called = True

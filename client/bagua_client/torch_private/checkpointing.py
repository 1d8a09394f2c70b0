"""How torch and transformers have a block recompute its activations in the backward pass, and where
that is switched on a live model. There is no public way to switch it, and none changes a name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


class NotRecomputed:
    """Runs a block as it is, so that what it computes is kept, in the place of the function that
    recomputes it. Copies and pickles of the model have that function, and nothing of ours.

    Args:
        given: that function.
    """

    def __init__(self, given: Any) -> None:
        self.given = given

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        found: str | tuple[Any, ...] = self.given.__reduce_ex__(protocol)
        return found


@dataclass(frozen=True)
class Way:
    """How one module is recomputed.

    Attributes:
        owner: of the attribute.
        attribute: that decides.
        given: its value as the training set it, with which the module is recomputed.
        kept: its value with which the module keeps its activations.
        block: the module that is recomputed.
        options: of ``torch.utils.checkpoint.checkpoint``, which does it.
        unknown: what does it in place of torch's function; empty: nothing does.
    """

    owner: object
    attribute: str
    given: Any
    kept: Any
    block: torch.nn.Module
    options: Mapping[str, Any]
    unknown: str = ""


def way_of(module: torch.nn.Module) -> Way | None:
    """How a module is recomputed; None: it is not. Looks at modules that somebody has imported, and
    imports none."""
    wrappers = _imported("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    if wrappers is not None and isinstance(module, wrappers.CheckpointWrapper):
        inner = module._checkpoint_wrapped_module
        return _by_function(module, "checkpoint_fn", inner)
    if _is_set(module) and _is_layer(module):
        return _by_function(module, "_gradient_checkpointing_func", module)
    # Asked of a module that has no such state, torch would leave a trace in it.
    contract = _imported("torch.distributed._composable.contract")
    if contract is None or contract.STATE_KEY not in vars(module):
        return None
    composable = _imported("torch.distributed._composable.checkpoint_activation")
    state = composable and composable.checkpoint.state(module)
    if state is not None:
        return Way(state, "enable_hook", True, False, module, {"use_reentrant": False})
    return None


def _imported(name: str) -> Any:
    return sys.modules.get(name)


def _by_function(owner: Any, attribute: str, block: torch.nn.Module) -> Way:
    given = getattr(owner, attribute)
    function: Any = given
    options: dict[str, Any] = {}
    while isinstance(function, partial):
        options, function = {**function.keywords, **options}, function.func
    unknown = ""
    if isinstance(function, NotRecomputed):
        unknown = "a tuning of another model has it"
    elif function is not checkpoint:
        unknown = getattr(function, "__qualname__", type(function).__name__)
    return Way(owner, attribute, given, NotRecomputed(given), block, options, unknown)


def recomputes_itself(module: torch.nn.Module) -> bool:
    """Whether a module of an older transformers, or one with its own code, recomputes its blocks in
    its own forward pass."""
    return _is_set(module) and not _is_layer(module)


def _is_set(module: torch.nn.Module) -> bool:
    """Whether transformers, or code like it, was told to recompute a module."""
    return getattr(module, "gradient_checkpointing", None) is True


def _is_layer(module: torch.nn.Module) -> bool:
    """Whether transformers recomputes a module by itself, and not the whole model its blocks."""
    return any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)


def keeps_elsewhere(module: torch.nn.Module) -> bool:
    """Whether what a module's backward pass needs is kept in the host's memory."""
    wrappers = _imported("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    return wrappers is not None and isinstance(module, wrappers.OffloadWrapper)


def has_saved_tensor_hooks() -> bool:
    """Whether something takes hold of what is saved for the backward pass, here and now."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is not None and top(True) is not None


def rounds_when_compiled() -> bool:
    """Whether what is compiled as a whole may round 16-bit numbers otherwise than when it is
    recomputed: inductor leaves roundings out inside a kernel, and fuses other kernels then."""
    inductor: Any = sys.modules.get("torch._inductor.config")
    return inductor is None or not inductor.emulate_precision_casts

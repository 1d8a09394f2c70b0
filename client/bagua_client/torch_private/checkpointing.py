"""How torch and transformers have a block recompute its activations in the backward pass, and where
that is switched on a live model. There is no public way to switch it, and none changes a name."""

from __future__ import annotations

import inspect
import sys
import weakref
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


class _NotTrained(NotRecomputed):
    """In the place of a reentrant function: torch does not train what is given nothing that
    requires a gradient."""

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, torch.Tensor) and each.requires_grad for each in args):
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)


class _Shared(NotRecomputed):
    """Stands where a model has one function for all of its blocks, some of which have their own."""

    def __init__(self, given: Any) -> None:
        super().__init__(given)
        self._own: dict[int, Any] = {}

    def with_own(self, block: torch.nn.Module, function: Any) -> Any:
        """Have a block's own ``function``; what stands in the model then."""
        self._own[id(block)] = function
        if function is self.given:
            del self._own[id(block)]
        return self if self._own else self.given

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        block: Any = function
        while isinstance(block, partial):
            block = block.func
        own = self._own.get(id(getattr(block, "__self__", block)), self.given)
        return own(function, *args, **kwargs)


@dataclass(frozen=True)
class Way:
    """How one module is recomputed. It holds the model's modules weakly.

    Attributes:
        owner: of the attribute.
        attribute: that decides.
        given: its value as the training set it, with which the module is recomputed.
        kept: its value with which the module keeps its activations.
        block: the module that is recomputed.
        options: of ``torch.utils.checkpoint.checkpoint``, which does it.
        unknown: what does it in place of torch's function; empty: nothing does.
        is_shared: whether the attribute is that of several modules.
    """

    owner: weakref.ref[Any]
    attribute: str
    given: Any
    kept: Any
    block: weakref.ref[torch.nn.Module]
    options: Mapping[str, Any]
    unknown: str = ""
    is_shared: bool = False

    @property
    def is_reentrant(self) -> bool:
        """Whether its forward pass is made without gradients, and another one with its own backward
        pass inside of the model's."""
        return bool(self.options.get("use_reentrant", True))

    @property
    def is_set_anew(self) -> bool:
        """Whether the training has set the attribute to what it was, since something else was put:
        some recompute nothing while they generate."""
        now = getattr(self.owner(), self.attribute, None)
        return now is self.given or _is_alike(now, self.given)

    def put(self, value: Any) -> None:
        """Have this value decide, from the next forward pass on."""
        owner, block = self.owner(), self.block()
        if owner is None or block is None:
            return
        now = getattr(owner, self.attribute)
        if callable(now) and not (isinstance(now, NotRecomputed) or self.is_set_anew):
            return  # The training has set another function since.
        if self.is_shared:
            shared = getattr(owner, self.attribute)
            shared = shared if isinstance(shared, _Shared) else _Shared(self.given)
            value = shared.with_own(block, value)
        setattr(owner, self.attribute, value)


def ways_of(module: torch.nn.Module) -> list[Way]:
    """How a module is recomputed, or those that it has recomputed in its own forward pass; empty:
    none is. Looks at modules that somebody has imported, and imports none."""
    wrappers = _imported("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    if wrappers is not None and isinstance(module, wrappers.CheckpointWrapper):
        return [_by_function(module, "checkpoint_fn", module._checkpoint_wrapped_module)]
    if getattr(module, "gradient_checkpointing", None) is True:  # transformers, or code like it
        name = "_gradient_checkpointing_func"
        if any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__):
            return [_by_function(module, name, module)]
        # Older ones, whose model hands each of its blocks to the function.
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        lists = [each for each in module.children() if isinstance(each, torch.nn.ModuleList)]
        if code is not None and name in code.co_names and hasattr(module, name):
            blocks = [block for each in lists for block in each]
            return [_by_function(module, name, block, is_shared=True) for block in blocks]
    # Asked of a module that has no such state, torch would leave a trace in it.
    contract = _imported("torch.distributed._composable.contract")
    if contract is None or contract.STATE_KEY not in vars(module):
        return []
    composable = _imported("torch.distributed._composable.checkpoint_activation")
    state = composable and composable.checkpoint.state(module)
    if not state:
        return []
    options = {"use_reentrant": False}
    return [Way(weakref.ref(state), "enable_hook", True, False, weakref.ref(module), options)]


def _imported(name: str) -> Any:
    return sys.modules.get(name)


def _by_function(
    owner: torch.nn.Module, attribute: str, block: torch.nn.Module, is_shared: bool = False
) -> Way:
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
    is_reentrant = options.get("use_reentrant", True)
    kept = _NotTrained(given) if is_reentrant else NotRecomputed(given)
    places = weakref.ref(owner), weakref.ref(block)
    return Way(places[0], attribute, given, kept, places[1], options, unknown, is_shared)


def _is_alike(one: Any, other: Any) -> bool:
    """Whether two functions are the same one with the same options."""
    if not (isinstance(one, partial) and isinstance(other, partial)):
        return False
    return bool(one.func is other.func and one.keywords == other.keywords)


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

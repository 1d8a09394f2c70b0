"""The blocks of a model that the training has made recompute their activations: found, watched for
what forbids to switch them and for what they would keep, and switched."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch.utils.hooks import RemovableHandle

from bagua_client.torch_private import checkpointing as torchs
from bagua_client.torch_private.compiled import is_compiled
from bagua_client.torch_private.reducer import is_in_backward
from bagua_client.torch_private.wrapper import Unsaved, untraced

ELSEWHERE = "what is saved for the backward pass is kept elsewhere, as in the host's memory"
WHOLE = "the whole model is compiled as one"
VARIES = 0.05
NOT_TRAINED = "none of its inputs requires a gradient, so that torch does not train it"


class Block:
    """One block that is recomputed. It holds the model's modules weakly.

    Args:
        way: how it is recomputed.
        is_compiled: whether the compiler is given it together with what recomputes it.

    Attributes:
        was_seen: whether a forward pass of it was.
        was_measured: whether it was recomputed since it is watched.
        kept_bytes: what it keeps for its backward pass if it is not recomputed, as recomputing it
            has shown; 0: that is not known.
        hindrance: why it cannot be switched, as its passes have shown; empty: it can.
    """

    def __init__(self, way: torchs.Way, is_compiled: bool) -> None:
        self.is_compiled = is_compiled
        self.was_seen = self.was_measured = False
        self.kept_bytes, self.hindrance = 0, ""
        self._least_bytes = sys.maxsize
        self._way = way
        self._handles: list[RemovableHandle] = []

    @property
    def module(self) -> torch.nn.Module | None:
        """What is recomputed; None: it is gone."""
        return self._way.block()

    @property
    def draws_again(self) -> bool:
        """Whether its random numbers are the same ones when it is recomputed."""
        return bool(self._way.options.get("preserve_rng_state", True))

    @property
    def buffers(self) -> Sequence[torch.Tensor]:
        module = self._way.block()
        return () if module is None else tuple(module.buffers())

    @property
    def varies(self) -> bool:
        """Whether what it keeps does, by more than an allocator makes of it."""
        return self.kept_bytes > (1 + VARIES) * self._least_bytes

    def recompute(self) -> None:
        """Have it recomputed, as the training has said."""
        self._set(self._way.given)

    def keep(self) -> None:
        """Have its activations kept, from the next forward pass on."""
        self._set(self._way.kept)

    def watch(self, allocated_bytes: Callable[[], int] | None) -> None:
        """Have it recomputed, and see what that takes and what forbids to leave it out, until it is
        switched again. One that is compiled is not watched: it would be compiled anew for that.

        Args:
            allocated_bytes: what is allocated on its device now; None: nobody knows.
        """
        given = self._way.given
        self._set(given)
        self.was_measured = False
        if self.is_compiled:
            return
        if callable(given):
            self._way.put(_Watched(given, self._look, self._measured(allocated_bytes)))
        elif (module := self._way.block()) is not None:
            self._watch_module(module, allocated_bytes or (lambda: 0))

    def _look(self, args: Sequence[Any]) -> None:
        """Its forward pass begins."""
        self.was_seen = True
        if torchs.has_saved_tensor_hooks():
            self.hindrance = ELSEWHERE
        elif self._way.options.get("use_reentrant", True) and not any(
            isinstance(each, torch.Tensor) and each.requires_grad for each in args
        ):
            self.hindrance = NOT_TRAINED

    def _measured(self, allocated_bytes: Callable[[], int] | None) -> Callable[..., Any]:
        """What calls a function, and knows what that has allocated if it is in a backward pass."""

        def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if allocated_bytes is None or not is_in_backward():
                return function(*args, **kwargs)
            before = allocated_bytes()
            try:
                return function(*args, **kwargs)
            finally:  # Torch ends it by an exception once it has all that it needs.
                self._keeps(allocated_bytes() - before)

        return call

    def _keeps(self, size_bytes: int) -> None:
        self.was_measured = True
        self._least_bytes = min(self._least_bytes, size_bytes)
        self.kept_bytes = max(self.kept_bytes, size_bytes)

    def _watch_module(self, module: torch.nn.Module, allocated_bytes: Callable[[], int]) -> None:
        """Where torch recomputes it by calling the module."""
        before: list[int] = []

        @untraced
        def begins(_: torch.nn.Module, args: Sequence[Any]) -> None:
            if is_in_backward():
                before.append(allocated_bytes())
            else:
                self._look(args)

        @untraced
        def ends(*_: Any) -> None:
            if before:
                self._keeps(allocated_bytes() - before.pop())

        self._handles = [
            # Before torch's own, in which what is saved is held back already.
            module.register_forward_pre_hook(Unsaved(begins), prepend=True),
            module.register_forward_hook(Unsaved(ends), always_call=True),
        ]

    def _set(self, value: Any) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._way.put(value)


class _Watched(torchs.NotRecomputed):
    """Has a block recomputed as ``given`` does, and watched."""

    def __init__(
        self,
        given: Callable[..., Any],
        look: Callable[[Sequence[Any]], None],
        measured: Callable[..., Any],
    ) -> None:
        super().__init__(given)
        self._look, self._measured = look, measured

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.given(function, *args, **kwargs)
        self._look(args)
        return self.given(partial(self._measured, function), *args, **kwargs)


def blocks_of(model: torch.nn.Module) -> tuple[list[Block], str]:
    """The blocks of a model that can be switched, in the order in which the model lists them, and
    why none of them can be, or some cannot; empty: nothing is recomputed, or all can be."""
    found: list[Block] = []
    theirs: set[str] = set()
    # Modules of what is compiled, and of blocks, which are recomputed as parts of these.
    compiled, inner = weakref.WeakSet[torch.nn.Module](), weakref.WeakSet[torch.nn.Module]()
    is_offloaded = False
    for module in model.modules():
        is_offloaded |= torchs.keeps_elsewhere(module)
        if is_compiled(module):
            compiled.update(module.modules())
        for way in () if module in inner else torchs.ways_of(module):
            if way.unknown:
                theirs.add(way.unknown)
            else:
                found.append(Block(way, module in compiled))
            inner.update(cast(torch.nn.Module, way.block()).modules())
    if not found:
        names = ", ".join(sorted(theirs))
        return [], f"they are recomputed by {names}, which is not torch's" if theirs else ""
    if is_compiled(model):
        return [], WHOLE
    if is_offloaded:
        return [], ELSEWHERE
    left = f"some are recomputed by {', '.join(sorted(theirs))}" if theirs else ""
    return found, left

"""Torch's DistributedDataParallel, with the moments in it at which something of ours is done."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch._C._distributed_c10d import BuiltinCommHookType

P = ParamSpec("P")
T = TypeVar("T")


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """``torch.compiler.disable``, without importing the compiler for who does not use it."""
    found: Callable[P, T] = cast(Any, torch)._disable_dynamo(function)
    return found


@dataclass(frozen=True)
class Parameters:
    """What torch's reducer is made with: those that trained when the model was wrapped."""

    tensors: list[torch.nn.Parameter]
    expect_sparse: list[bool]
    names: dict[int, str]


kept_parameters: WeakKeyDictionary[DistributedDataParallel, Parameters] = WeakKeyDictionary()
"""Of the wrappers of ours, as they were made."""


class WithMoments(DistributedDataParallel):
    """Torch's class with the moments of a forward pass that ours needs.

    Module hooks would be public, but none stands around the buffers.
    """

    _is_followed = False
    """Whether anybody wants to know of them; else torch.compile traces no more than torch's."""

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._is_followed and self._begin_forward():
            return self._pre_forward_uncut(*inputs, **kwargs)
        return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    @untraced
    def _pre_forward_uncut(self, *inputs: Any, **kwargs: Any) -> Any:
        reducer = self.reducer
        self.reducer = cast(Any, _Uncut(reducer))
        try:
            return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            self.reducer = reducer

    def _sync_buffers(self) -> None:
        if self._is_followed:
            self._timed_sync(super()._sync_buffers)
        else:
            super()._sync_buffers()  # type: ignore[no-untyped-call]

    @untraced
    def _begin_forward(self) -> bool:
        return self._forward_begins()

    @untraced
    def _timed_sync(self, sync: Callable[[], None]) -> None:
        if not self._buffers_stay():
            with self._buffers_travel():
                sync()

    def _build_params_for_reducer(self) -> Any:
        """Kept: weights may be frozen or thawed later, and torch's reducer goes on with these."""
        built = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        names = super()._build_debug_param_to_name_mapping(built[0])  # type: ignore[no-untyped-call]
        tensors, expect_sparse = built
        kept_parameters[self] = Parameters(tensors, expect_sparse, names)
        return built

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """As torch's: ``hook`` carries the buckets from now on, and no way of ours does."""
        known = len(self._comm_hooks)
        self._hook_comes()
        try:
            super().register_comm_hook(state, hook)
        except Exception:
            # Torch lists it before its reducer refuses a second one.
            del self._comm_hooks[known:]
            raise
        finally:
            self._hook_came()

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        self._hook_comes()
        super()._register_builtin_comm_hook(comm_hook_type)  # type: ignore[no-untyped-call]
        self._hook_came()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A class that ``tune`` made for a subclass of somebody's has no name to be found under:
        what it wraps is copied and saved as what it was."""
        made_of = type(self).__dict__.get("_made_of")
        if made_of is None:
            return super().__reduce_ex__(protocol)
        return copyreg._reconstructor, (made_of, object, None), self.__getstate__()  # type: ignore

    # What ours does at a moment: before anything else in a forward pass (which tells whether torch
    # shall leave its buckets as they are in it), around a broadcast of the module's buffers, before
    # a communication hook of the user's is registered, and after that.
    def _forward_begins(self) -> bool:
        return False

    def _buffers_stay(self) -> bool:
        return False

    def _buffers_travel(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _hook_comes(self) -> None: ...
    def _hook_came(self) -> None: ...


def before_module(ddp: DistributedDataParallel, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
    """What torch's wrapper does before its module's forward pass, for a module that is called
    itself; answers with the arguments of that pass."""
    found: tuple[Any, Any] = ddp._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
    return found


def after_module(ddp: DistributedDataParallel, output: Any) -> Any:
    """The same, after that pass; answers with the output that the training is to see."""
    return ddp._post_forward(output)  # type: ignore[no-untyped-call]


def let_go(ddp: DistributedDataParallel) -> None:
    """Take torch's reducer away from weights that another wrapper is to train: two would both
    reduce their gradients. The wrapper cannot train after that."""
    vars(ddp).pop("reducer", None)
    ddp.logger = None


class _Uncut:
    """A reducer in a forward pass that not all ranks may make, where it must not cut its buckets:
    the ranks tell one another the order."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False

"""The forward passes of a model: which are of a training, how much they are given, and which still
have a backward pass to come."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from bagua_client.torch_private.wrapper import called_untraced


class _Pass:
    """One forward pass; what it computed holds it."""

    has_come_back = False

    def come_back(self, _: torch.Tensor) -> None:
        self.has_come_back = True


def is_of_training(model: torch.nn.Module) -> bool:
    """Whether a pass of it is one of a training that Python makes: where the compiler follows the
    model, there must be nothing for it to follow."""
    return not torch.compiler.is_compiling() and torch.is_grad_enabled() and model.training


class Passes:
    """The forward passes of one model, and of its blocks alone, whose results are still held."""

    def __init__(self) -> None:
        self._held: list[weakref.ref[_Pass]] = []

    def forward_ends(self, output: Any) -> None:
        """A forward pass has computed ``output``."""
        made = _Pass()
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(called_untraced(made.come_back))  # type: ignore[no-untyped-call]
        self._held = [*self._still_open(), weakref.ref(made)]

    @property
    def open(self) -> int:
        """Through how many of them a backward pass may yet come for the first time."""
        return len(self._still_open())

    def _still_open(self) -> list[weakref.ref[_Pass]]:
        held = [(reference, reference()) for reference in self._held]
        return [r for r, found in held if found is not None and not found.has_come_back]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a forward pass is given, or has computed."""
    for _, tensor in named_tensors(value):
        yield tensor


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The same, by their places in whatever holds them."""
    inner: Iterable[tuple[object, Any]] = ()
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        inner = value.items()
    elif isinstance(value, list | tuple):
        inner = enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    for key, each in inner:
        yield from named_tensors(each, f"{name}.{key}")

"""The forward passes of a model: which are of a training, how much they are given, and which still
have a backward pass to come."""

from __future__ import annotations

import dataclasses
import math
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
    return model.training and is_remembered()


def is_remembered() -> bool:
    """Whether a pass may have a backward pass, whatever the model is in; see is_of_training."""
    return not torch.compiler.is_compiling() and torch.is_grad_enabled()


class Passes:
    """The forward passes of one model, and of its blocks alone, whose results are still held."""

    def __init__(self) -> None:
        self._held: list[weakref.ref[_Pass]] = []

    def forward_ends(self, output: Any) -> None:
        """A forward pass has computed ``output``."""
        made = _Pass()
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:  # Hooks of a weight would stay.
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
    """Tensors that a forward pass is given, or has computed, by their places in what holds them."""
    if isinstance(value, torch.Tensor):
        yield name, value
    for key, each in _inside(value):
        yield from named_tensors(each, f"{name}.{key}")


def _inside(value: Any) -> Iterable[tuple[object, Any]]:
    """What holds something holds these, by their places."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, list | tuple):
        return enumerate(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return ()


MOST_LOOKED_AT = 200


def elements_in(value: Any) -> float:
    """How many elements the tensors have in what a forward pass is given; NaN where it has more
    parts than a look in each step is worth."""
    found = looked_at = 0
    waiting: list[Iterable[tuple[object, Any]]] = [[("", value)]]
    while waiting:
        for _, each in waiting.pop():
            looked_at += 1
            if looked_at > MOST_LOOKED_AT:
                return math.nan
            if isinstance(each, torch.Tensor):
                found += each.numel()
            else:
                waiting.append(_inside(each))
    return found

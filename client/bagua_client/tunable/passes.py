"""Which forward passes of a model still have a backward pass to come."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from bagua_client.torch_private.wrapper import called_untraced


class _Pass:
    """One forward pass; what it computed holds it."""

    has_come_back = False

    def come_back(self, _: torch.Tensor) -> None:
        self.has_come_back = True


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
    """What a forward pass has computed, in whatever holds it."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))

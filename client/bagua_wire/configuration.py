"""A configuration as it is told between client, service and simulator, and what a file with one
says of the model that it is for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

Value = int | str | tuple[int, ...]
"""Of a knob: a number, a name, or a list of numbers."""
FILE_FORMAT = 1
"""The number that a file with a configuration has as its ``format``."""


class Configuration(Mapping[str, Value]):
    """A value for every knob, also for those that are not known here; immutable and hashable.

    >>> Configuration(bucket_bytes=4 << 20, hierarchical="off")["bucket_bytes"]
    4194304
    """

    __slots__ = ("_hash", "_values")

    def __init__(self, values: Mapping[str, Value] | None = None, /, **named: Value) -> None:
        given = {**(values or {}), **named}
        # JSON knows lists only; a configuration is hashable.
        self._values: dict[str, Value] = {
            knob: tuple(value) if isinstance(value, list) else value
            for knob, value in given.items()
        }
        self._hash: int | None = None

    def __getitem__(self, knob: str) -> Value:
        return self._values[knob]

    def number(self, knob: str) -> int:
        """The value of a knob that is a number."""
        value = self._values[knob]
        if not isinstance(value, int):
            raise TypeError(f"knob {knob!r} is {value!r} and not a number")
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        # Once: searches look hundreds of them up in every decision.
        if self._hash is None:
            self._hash = hash(frozenset(self._values.items()))
        return self._hash

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Configuration):
            return self._values == other._values
        return Mapping.__eq__(self, other)

    def __repr__(self) -> str:
        return f"Configuration({self._values})"


class NamedTensor(Protocol):
    """A tensor, as far as a model is told by it."""

    @property
    def name(self) -> str: ...
    @property
    def elements(self) -> int: ...
    @property
    def dtype(self) -> str: ...


def described(tensors: Sequence[NamedTensor]) -> dict[str, Any]:
    """What a file says of a model, by which another one is told.

    Args:
        tensors: in gradient-ready order.
    """
    said = [(each.name, each.elements, each.dtype) for each in tensors]
    return {
        "count": len(said),
        "digest": digest_of(sorted(said)),
        "order_digest": digest_of(said),
    }


def digest_of(value: object) -> str:
    """Of a JSON value, in 32 characters."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]

"""What a value in the code of an optimizer can be, as far as reading it tells.

Parameters that are stepped as one have the same settings and the same numbers in their states. So
whatever is computed from these alone is right for all of them; only what touches a tensor has to be
looked at.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch


class NotElementWise(Exception):
    """Raised for what is not known to treat each element by itself; the text says what it is."""


class Kind(Enum):
    """A kind of values that are not known before the step runs, named as in messages."""

    NUMBER = "a number"
    """A number, or anything else that is the same for all parameters that are stepped as one."""
    COUNT = "a number of the state"
    """A number that each parameter has of its own; all are alike."""
    TENSOR = "a tensor"
    """One value for each element of a parameter."""
    SHAPE = "the shape of a tensor"
    LENGTH = "a number of parameters"
    INDEX = "the place of a parameter"
    CARRIED = "a value of another parameter"
    OPTIMIZER = "the optimizer"
    GROUPS = "param_groups"
    GROUP = "a parameter group"
    STATES = "the states"
    STATE = "the state of a parameter"
    CLOSURE = "the closure"
    SEVERAL = "several numbers"
    """Numbers in a tuple: as many as it is taken apart into."""


@dataclass(frozen=True)
class Known:
    """A constant, a module, a class or a function."""

    value: Any


@dataclass
class ListOf:
    """Several values of one kind.

    Attributes:
        element: what each is; widened as more is appended.
        is_over_parameters: there is one for each parameter, in their order.
    """

    element: Value
    is_over_parameters: bool = True


@dataclass(frozen=True)
class TupleOf:
    """Several values, such as a function returns."""

    parts: tuple[Value, ...]


@dataclass(frozen=True)
class DictOf:
    """A dictionary whose keys are known."""

    parts: tuple[tuple[str, Value], ...]


@dataclass(frozen=True)
class Method:
    """A function of the optimizer's class ``owner``, which is called with the optimizer."""

    owner: type
    function: Callable[..., Any]


@dataclass(frozen=True)
class AttributeOf:
    """Something that is called by name, such as ``add_`` of a tensor."""

    base: Value
    name: str


Value = Kind | Known | ListOf | TupleOf | DictOf | Method | AttributeOf
NUMBERS = (Kind.NUMBER, Kind.COUNT)


def is_number(value: Value) -> bool:
    """Whether it is the same for all parameters that are stepped as one."""
    if isinstance(value, TupleOf):
        return all(map(is_number, value.parts))
    if isinstance(value, DictOf):
        return all(is_number(part) for _, part in value.parts)
    return isinstance(value, Known) or value in NUMBERS


def joined(first: Value, second: Value) -> Value:
    """Return the kind of a value that is either of two.

    Raises:
        NotElementWise: nothing could be said of it.
    """
    if first == second:
        return first
    if isinstance(first, ListOf) and isinstance(second, ListOf):
        # Both are still appended to by their other names.
        first.element = second.element = joined(first.element, second.element)
        return first
    if (
        isinstance(first, TupleOf)
        and isinstance(second, TupleOf)
        and len(first.parts) == len(second.parts)
    ):
        return TupleOf(tuple(map(joined, first.parts, second.parts)))
    if is_number(first) and is_number(second):
        is_counted = Kind.COUNT in (first, second) and Kind.NUMBER not in (first, second)
        return Kind.COUNT if is_counted else Kind.NUMBER
    for one, other in ((first, second), (second, first)):
        if one is Kind.CARRIED or (one is Kind.TENSOR and is_number(other)):
            return one
        if isinstance(one, Known) and one.value is None:
            return other
        if one == ListOf(Known(None)) and other is Kind.GROUPS:
            return other
    raise NotElementWise(f"a name stands for {described(first)} or for {described(second)}")


def described(value: Value) -> str:
    """The value as a message names it."""
    match value:
        case Kind():
            return value.value
        case Known():
            return getattr(value.value, "__name__", repr(value.value))
        case ListOf():
            return f"a list of which each is {described(value.element)}"
        case Method():
            return value.function.__name__
        case AttributeOf():
            return f".{value.name} of {described(value.base)}"
        case TupleOf() | DictOf():
            return "several values"


def is_plain(value: Any) -> bool:
    """Whether it is made of numbers, words and the like, and nothing in it is of a parameter."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not isinstance(value, torch.nn.Parameter)
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, [*value, *value.values()]))
    words = (bool, int, float, complex, str, types.NoneType, torch.dtype, torch.device, Enum)
    return isinstance(value, words)

"""What a value in the code of an optimizer can be, as far as reading it tells, and what its groups,
attributes and states hold.

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
from torch.optim import Optimizer


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


MISSING = "missing"
Decided = dict[tuple[str, str], Any]
"""Settings by where they are and their name, on whose values it depends what the code does."""


def setting(optimizer: Optimizer, where: str, name: str) -> list[Any]:
    """The values of a setting: of an attribute one, else one for each group."""
    if where == "attribute":
        return [vars(optimizer).get(name, MISSING)]
    return [group.get(name, MISSING) for group in optimizer.param_groups]


class Settings:
    """What is known of one optimizer.

    Switches, which are true, false, none or a word, are taken as they are, so that code that is
    switched off is not read; numbers may change in any step.

    Attributes:
        decided: the switches that were looked at.
        changed: the settings that the code itself sets, which are no switches.
        states: the kinds of its states, by name.
        asked: the states that were looked for.
        changes: to tensors, states and settings, so far in this reading.
        uses_data: ``data`` of a tensor, whose changes torch does not count.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.decided: Decided = {}
        self.changed: set[tuple[str, str]] = set()
        self.states: dict[str, Value] = {}
        self.asked: set[str] = set()
        self.changes = 0
        self.uses_data = False

    def progress(self) -> object:
        """A mark that changes when something is learned that earlier lines may depend on."""
        return len(self.changed), dict(self.states)

    def of_group(self, name: str, default: Value | None = None) -> Value:
        if name == "params":
            return ListOf(Kind.TENSOR)
        values = setting(self.optimizer, "group", name)
        if ("group", name) not in self.changed and values == [MISSING] * len(values):
            self.decided["group", name] = values
            return Kind.NUMBER if default is None else default
        return self._value("group", name, values)

    def of_optimizer(self, name: str) -> Value:
        values = {"param_groups": Kind.GROUPS, "state": Kind.STATES}
        if name in values:
            return values[name]
        if name in vars(self.optimizer):
            return self._value("attribute", name, setting(self.optimizer, "attribute", name))
        return self.method(name, type(self.optimizer).__mro__)

    def _value(self, where: str, name: str, values: list[Any]) -> Value:
        if where == "attribute" and isinstance(values[0], types.FunctionType):
            self.decided[where, name] = values
            return Known(values[0])
        if not is_plain(values):
            raise NotElementWise(f"it keeps {type(values[0]).__name__} in {name}")
        is_switch = all(isinstance(value, bool | str | types.NoneType) for value in values)
        is_alike = all(value == values[0] for value in values)
        if (where, name) in self.changed or not (is_switch and is_alike):
            return Kind.NUMBER
        self.decided[where, name] = values
        return Known(values[0])

    def method(self, name: str, classes: tuple[type, ...]) -> Value:
        """The first of ``classes`` that has it."""
        for owner in classes:
            if name in vars(owner):
                found = vars(owner)[name]
                if isinstance(found, staticmethod):
                    return Known(found.__func__)
                if isinstance(found, types.FunctionType):
                    return Method(owner, found)
                if is_plain(found):
                    return Known(found)
                break
        raise NotElementWise(f"its attribute {name} cannot be read")

    def set_setting(self, where: str, name: str, value: Value, is_repeated: bool) -> None:
        """Note that the code sets it; ``is_repeated``: once for each parameter."""
        if not is_number(value) and value is not Kind.LENGTH:
            raise NotElementWise(f"it keeps {described(value)} in {name}")
        if value is Kind.LENGTH or (is_repeated and not isinstance(value, Known)):
            raise NotElementWise(f"it changes {name} once for each parameter")
        self.changed.add((where, name))
        self.changes += 1

    def of_state(self, name: str) -> Value:
        self.asked.add(name)
        return self.states.get(name, Kind.COUNT)

    def set_state(self, name: str, value: Value) -> None:
        if value is not Kind.TENSOR and not is_number(value):
            raise NotElementWise(f"it keeps {described(value)} in the state {name}")
        if value in NUMBERS or (isinstance(value, Known) and value.value is not None):
            value = Kind.COUNT
        before = self.states.get(name, value)
        self.states[name] = joined(before, value)
        self.changes += 1

    def check_states(self) -> None:
        """Check that all states that are looked at have been made.

        Raises:
            NotElementWise: something has not.
        """
        unknown = sorted(self.asked - self.states.keys())
        if unknown:
            raise NotElementWise(f"it reads the state {unknown[0]}, which its step does not make")


def has_changed(optimizer: Optimizer, decided: Decided) -> bool:
    """Whether a switch has another value than it had."""
    return any(setting(optimizer, *key) != values for key, values in decided.items())

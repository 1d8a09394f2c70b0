"""What an optimizer's groups, attributes and states hold, as its code is read."""

from __future__ import annotations

import functools
import types
from typing import Any

from torch.optim import Optimizer

from bagua_training.optimizers.reading.kinds import (
    NUMBERS,
    Kind,
    Known,
    ListOf,
    Method,
    NotElementWise,
    Value,
    described,
    is_number,
    is_plain,
    joined,
)

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
        """
        Args:
            is_repeated: once for each parameter.
        """
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


@functools.cache
def names_of_locals(code: types.CodeType) -> frozenset[str]:
    """The names of a function's locals, which are not looked for outside of it."""
    return frozenset(code.co_varnames + code.co_cellvars)

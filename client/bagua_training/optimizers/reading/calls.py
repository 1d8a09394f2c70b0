"""Reads what the calls in the code of an optimizer give."""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bagua_training.optimizers.reading import operations
from bagua_training.optimizers.reading.expressions import Expressions
from bagua_training.optimizers.reading.kinds import (
    AttributeOf,
    DictOf,
    Kind,
    Known,
    ListOf,
    Method,
    NotElementWise,
    TupleOf,
    Value,
    described,
    is_number,
    joined,
)
from bagua_training.optimizers.reading.operations import is_one_of

Words = Mapping[str, Value]
"""Arguments that are given by name."""


class Calls(Expressions):
    """The calls of one optimizer."""

    def run(
        self,
        function: Callable[..., Any],
        owner: type | None,
        values: Sequence[Value],
        words: Words,
    ) -> Value:
        """Read a function, and return what it returns."""
        raise NotImplementedError

    def call(self, node: ast.Call) -> Value:
        function = self._function(node.func)
        match function, node.args:
            case Known(called), [ast.Lambda() as test, several] if called is filter:
                return self._filtered(test, self.value(several))
        values = list(self.values(node.args))
        words: dict[str, Value] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value)
            if keyword.arg is None:
                raise NotElementWise(f"the arguments of `{ast.unparse(node)}` cannot be read")
            words[keyword.arg] = value
        every = [*values, *words.values()]
        match function:
            case Method(owner, found):
                return self.run(found, owner, [Kind.OPTIMIZER, *values], words)
            case Kind.CLOSURE if not every:
                if self.settings.changes or self.loops_over_parameters:
                    raise NotElementWise("it calls the closure in the middle of its step")
                return Kind.NUMBER
            case AttributeOf(Kind.TENSOR, name):
                return self._of_tensor(name, values, every)
            case AttributeOf(Kind.STATE, name):
                return self._of_state(name, values, words)
            case AttributeOf(Kind.STATES, "setdefault") if values == [Kind.TENSOR, DictOf(())]:
                return Kind.STATE
            case AttributeOf(Kind.GROUP, "get") if isinstance(values[0], Known):
                default = values[1] if len(values) > 1 else Known(None)
                return self.settings.of_group(str(values[0].value), default)
            case AttributeOf(ListOf() as base, "append") if len(values) == 1:
                base.element = joined(base.element, values[0])
                self.settings.changes += 1
                return Known(None)
            case AttributeOf(ListOf() as base, "extend") if isinstance(values[0], ListOf):
                base.element = joined(base.element, values[0].element)
                self.settings.changes += 1
                return Known(None)
            case AttributeOf(base, name) if is_number(base):
                return self._of_number(base, name, every)
            case Known(called):
                return self._of_function(called, values, words)
        raise NotElementWise(f"it calls {described(function)}")

    def _filtered(self, test: ast.Lambda, several: Value) -> Value:
        before = dict(self.frame.names)
        for argument in test.args.args:
            self.frame.names[argument.arg] = self.element(several)[0]
        self.truth(test.body)
        self.frame.names = before
        return several

    def _function(self, node: ast.expr) -> Value:
        match node:
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super"), args=[]), attr=name):
                order = type(self.settings.optimizer).__mro__
                if self.frame.owner in order:
                    after = order.index(self.frame.owner) + 1
                    return self.settings.method(name, order[after:])
        return self.value(node)

    def _of_tensor(self, name: str, values: list[Value], every: list[Value]) -> Value:
        if name in operations.NEVER:
            return Known(False)
        if name in operations.ASKED:
            return Kind.NUMBER
        if name == "size" and not every:
            return Kind.SHAPE
        plain = name.removesuffix("_")
        is_of_two = name in ("max", "min") and values == [Kind.TENSOR] == every
        if not (is_of_two or {plain, name} & (operations.ELEMENT_WISE | operations.METHODS)):
            raise NotElementWise(f"it calls .{name} of a tensor")
        self.settings.changes += name.endswith("_")
        return self.result([Kind.TENSOR, *every])

    def _of_number(self, base: Value, name: str, every: list[Value]) -> Value:
        plain = name.removesuffix("_")
        is_element_wise = bool({plain, name} & (operations.ELEMENT_WISE | operations.METHODS))
        is_changed = name.endswith("_")
        if not is_element_wise and name not in operations.OF_NUMBERS:
            raise NotElementWise(f"it calls .{name} of {described(base)}")
        if is_changed and base is not Kind.COUNT and self.loops_over_parameters:
            raise NotElementWise(f"it changes {described(base)} once for each parameter")
        found = self.result([base, *every])
        if found is Kind.TENSOR and (is_changed or not is_element_wise):
            raise NotElementWise(f"it calls .{name} of {described(base)} with a tensor")
        return base if is_changed else found

    def _of_state(self, name: str, values: list[Value], words: Words) -> Value:
        match name, values:
            case "get", [Known(str(key)), *default]:
                other = default[0] if default else Known(None)
                made = self.settings.states.get(key)
                return other if made is None else joined(made, other)
            case "setdefault", [Known(str(key)), default]:
                self.settings.set_state(key, default)
                return self.settings.of_state(key)
            case "update", ([] | [DictOf()]):
                given = [part for each in values if isinstance(each, DictOf) for part in each.parts]
                for key, value in [*given, *words.items()]:
                    self.settings.set_state(key, value)
                return Known(None)
        raise NotElementWise(f"it calls .{name} of the state of a parameter")

    def _of_function(self, called: Any, values: list[Value], words: Words) -> Value:
        every = [*values, *words.values()]
        if is_one_of(called, operations.TORCH_ELEMENT_WISE):
            self.settings.changes += "out" in words
            return self.result(every)
        if is_one_of(called, operations.TORCH_OF_TWO) and values == [Kind.TENSOR] * 2:
            self.settings.changes += "out" in words
            return self.result(every)
        if is_one_of(called, operations.TORCH_FILLED) and all(map(is_number, every[1:])):
            self.settings.changes += 1
            return self.result(every)
        if is_one_of(called, operations.TORCH_LISTS):
            return self._of_lists(called, every)
        if is_one_of(called, operations.TORCH_NEVER):
            return Known(False)
        if is_one_of(called, operations.TORCH_ASKED):
            return Kind.NUMBER
        if is_one_of(called, operations.TORCH_WITH_A_SHAPE) and values[:1] == [Kind.SHAPE]:
            return self.result([Kind.TENSOR, *every[1:]])
        if called is isinstance or is_one_of(called, operations.TORCH_CONTEXTS):
            return Kind.NUMBER
        if is_one_of(called, operations.BUILTINS_OF_TENSORS):
            return self.result(every)
        is_pure = is_one_of(called, operations.PURE) or type(called).__name__ == "ufunc"
        if is_pure and all(map(is_number, every)):
            return Kind.NUMBER
        if called is dict and not values:
            return DictOf(tuple(words.items()))
        found = None if words.keys() - {"strict"} else self._of_lengths(called, values)
        if found is not None:
            return found
        is_torchs = str(getattr(called, "__module__", "")).startswith("torch.")
        if isinstance(called, types.FunctionType) and not (
            is_torchs and "torch.optim" not in called.__module__
        ):
            return self.run(called, None, values, words)
        given = ", ".join(map(described, every)) or "nothing"
        raise NotElementWise(f"it calls {described(Known(called))} with {given}")

    def _of_lists(self, called: Any, every: list[Value]) -> Value:
        """Read a call of one of torch's operations on lists of tensors."""
        elements = [each.element if isinstance(each, ListOf) else each for each in every]
        found = self.result(elements)
        if called.__name__.endswith("_"):
            self.settings.changes += 1
            return Known(None)
        return ListOf(found)

    def _of_lengths(self, called: Any, values: list[Value]) -> Value | None:
        """The result of a call that goes over several values, or counts them."""
        if called is len and values[0] in (Kind.STATE, Kind.STATES, Kind.GROUP, Kind.GROUPS):
            return Kind.NUMBER
        if called is len and isinstance(values[0], ListOf):
            return Kind.LENGTH if values[0].is_over_parameters else Kind.NUMBER
        if called is range and values == [Kind.LENGTH]:
            return ListOf(Kind.INDEX)
        if called is range and all(map(is_number, values)):
            return Kind.NUMBER
        if called in (list, tuple, any, all) and isinstance(values[0], ListOf):
            element = values[0].element
            if called in (any, all):
                return Kind.NUMBER if is_number(element) else None
            return ListOf(element, values[0].is_over_parameters)
        if called is enumerate and len(values) == 1:
            element, is_over_parameters = self.element(values[0])
            place = Kind.INDEX if is_over_parameters else Kind.NUMBER
            return ListOf(TupleOf((place, element)), is_over_parameters)
        if called is zip and values:
            found = [self.element(value) for value in values]
            if len({is_over_parameters for _, is_over_parameters in found}) == 1:
                return ListOf(TupleOf(tuple(element for element, _ in found)), found[0][1])
        return None

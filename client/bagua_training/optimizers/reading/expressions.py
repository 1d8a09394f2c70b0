"""Reads what the expressions in the code of an optimizer stand for, calls among them."""

from __future__ import annotations

import ast
import builtins
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bagua_training.optimizers.reading import operations
from bagua_training.optimizers.reading.kinds import (
    NUMBERS,
    AttributeOf,
    DictOf,
    Kind,
    Known,
    ListOf,
    Method,
    NotElementWise,
    Settings,
    TupleOf,
    Value,
    described,
    is_number,
    is_plain,
    joined,
)
from bagua_training.optimizers.reading.operations import is_one_of

Words = Mapping[str, Value]
"""Arguments that are given by name."""


@dataclass
class Frame:
    """One call of a function that is being read."""

    function: Callable[..., Any]
    owner: type | None
    names: dict[str, Value]
    returned: list[Value] = field(default_factory=list)
    loops_over_parameters: int = 0
    has_left: bool = False

    def outside(self, name: str) -> Any:
        """Return what a name stands for that is not the function's own."""
        code = self.function.__code__
        cells = dict(zip(code.co_freevars, self.function.__closure__ or (), strict=True))
        if name in cells:
            return cells[name].cell_contents
        if name in self.function.__globals__:
            return self.function.__globals__[name]
        if hasattr(builtins, name):
            return getattr(builtins, name)
        raise NotElementWise(f"{name} is not set on every way to this line")


class Expressions:
    """The expressions of one optimizer; its statements are read elsewhere.

    Attributes:
        settings: of the optimizer.
        frame: of the function that is being read.
        loops_over_parameters: that are open, those of its callers included.
        line: that is being read.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.frame: Frame
        self.loops_over_parameters = 0
        self.line = 0

    def run(
        self,
        function: Callable[..., Any],
        owner: type | None,
        values: Sequence[Value],
        words: Words,
    ) -> Value:
        """Read a function, and return what it returns."""
        raise NotImplementedError

    def value(self, node: ast.expr) -> Value:
        """Return what an expression stands for.

        Raises:
            NotElementWise: it is not known to treat each element by itself.
        """
        match node:
            case ast.Constant():
                return Known(node.value)
            case ast.Name():
                return self._name(node.id)
            case ast.Attribute():
                return self.attribute(self.value(node.value), node.attr)
            case ast.Subscript():
                return self._part(self.value(node.value), node.slice)
            case ast.Call():
                return self._call(node)
            case ast.BinOp():
                return self.combined([node.left, node.right], type(node.op))
            case ast.UnaryOp():
                return self._unary(node)
            case ast.Compare():
                return self._comparison(node)
            case ast.BoolOp():
                return self._choice(node)
            case ast.IfExp():
                return self._either(node)
            case ast.Tuple() | ast.List() | ast.Set():
                return self._several(node)
            case ast.Dict():
                return self._dictionary(node)
            case ast.ListComp() | ast.GeneratorExp():
                return self._comprehension(node)
            case ast.JoinedStr():
                return Kind.NUMBER
        raise NotElementWise(f"`{ast.unparse(node)}` cannot be read")

    def values(self, nodes: list[ast.expr]) -> Iterator[Value]:
        """The values of arguments or of the parts of a tuple; ``*several`` are given one by one."""
        for node in nodes:
            if isinstance(node, ast.Starred):
                several = self.value(node.value)
                if several is Kind.NUMBER:
                    several = TupleOf((Kind.SEVERAL,))
                if not isinstance(several, TupleOf):
                    raise NotElementWise(f"`{ast.unparse(node)}` cannot be read")
                yield from several.parts
            else:
                yield self.value(node)

    def _name(self, name: str) -> Value:
        if name not in self.frame.names:
            found = self.frame.outside(name)
            is_code = callable(found) or isinstance(found, types.ModuleType)
            if not is_code and not is_plain(found):
                raise NotElementWise(f"{name} is kept outside of the optimizer")
            return Known(found)
        value = self.frame.names[name]
        if value is Kind.CARRIED:
            raise NotElementWise(f"{name} may be of another parameter")
        return value

    def attribute(self, base: Value, name: str) -> Value:
        match base:
            case Kind.OPTIMIZER:
                return self.settings.of_optimizer(name)
            case Kind.TENSOR:
                self.settings.uses_data |= name == "data"
                if name in operations.ATTRIBUTES:
                    return Kind.TENSOR if operations.ATTRIBUTES[name] else Kind.NUMBER
                if name == "is_sparse":
                    return Known(False)
                if name == "shape":
                    return Kind.SHAPE
                return AttributeOf(base, name)
            case Known(value) if isinstance(value, types.ModuleType | type) or is_plain(value):
                if not hasattr(value, name):
                    raise NotElementWise(f"{described(base)} has no {name}")
                if isinstance(value, types.ModuleType):
                    return Known(getattr(value, name))
        if base in NUMBERS or isinstance(base, Kind | Known | ListOf):
            return AttributeOf(base, name)
        raise NotElementWise(f"it looks at {name} of {described(base)}")

    def _part(self, base: Value, index: ast.expr) -> Value:
        found = Kind.NUMBER if isinstance(index, ast.Slice) else self.value(index)
        match base, found:
            case Kind.STATES, Kind.TENSOR:
                return Kind.STATE
            case (Kind.STATE, Known(str(name))):
                return self.settings.of_state(name)
            case (Kind.GROUP, Known(str(name))):
                return self.settings.of_group(name)
            case Kind.GROUPS, Known() | Kind.NUMBER:
                return Kind.GROUP
            case ListOf(element, True), Kind.INDEX:
                return element
            case ListOf(element, False), Known() | Kind.NUMBER:
                return element
            case TupleOf(parts), Known(int(place)):
                return parts[place]
        if is_number(base) and is_number(found):
            return Kind.NUMBER
        raise NotElementWise(f"it takes a part of {described(base)}")

    def combined(self, nodes: list[ast.expr], operator: type = ast.Add) -> Value:
        """The value of an operator or a comparison; all but the product of matrices are
        element-wise."""
        return self.result([self.value(node) for node in nodes], operator)

    def result(self, values: list[Value], operator: type = ast.Add) -> Value:
        if all(map(is_number, values)):
            return Kind.NUMBER
        if operator is ast.Add and all(isinstance(value, ListOf) for value in values):
            return joined(*values)
        for value in values:
            if value is not Kind.TENSOR and not is_number(value):
                raise NotElementWise(f"it computes with {described(value)}")
        if operator is ast.MatMult:
            raise NotElementWise("it multiplies matrices")
        return Kind.TENSOR

    def _unary(self, node: ast.UnaryOp) -> Value:
        if isinstance(node.op, ast.Not):
            known = self.truth(node.operand)
            return Kind.NUMBER if known is None else Known(not known)
        return self.combined([node.operand])

    def _comparison(self, node: ast.Compare) -> Value:
        values = [self.value(each) for each in (node.left, *node.comparators)]
        first, second, operator = values[0], values[1], node.ops[0]
        if len(values) > 2:
            return self.result(values)
        if first is Kind.STATE and second == DictOf(()):
            return Kind.NUMBER
        if isinstance(operator, ast.Is | ast.IsNot):
            if isinstance(first, Known) and isinstance(second, Known):
                return Known((first.value is second.value) is isinstance(operator, ast.Is))
            return Kind.NUMBER
        if isinstance(operator, ast.In | ast.NotIn):
            is_of_state = second in (Kind.STATE, Kind.STATES, Kind.GROUP)
            return Kind.NUMBER if is_of_state or is_number(second) else self.result(values)
        if Kind.LENGTH in values and isinstance(second, Known) and second.value in (0, 1):
            return Kind.NUMBER
        match first, second, operator:
            case Known(one), Known(other), (ast.Eq() | ast.NotEq()):
                return Known((one == other) is isinstance(operator, ast.Eq))
        return self.result(values)

    def truth(self, node: ast.expr) -> bool | None:
        """Whether a test is true; None: it depends on the step.

        Raises:
            NotElementWise: it depends on the values of a tensor.
        """
        value = self.value(node)
        if isinstance(value, Known):
            return bool(value.value)
        if value is Kind.TENSOR or value is Kind.INDEX:
            raise NotElementWise(f"it decides by {described(value)}, `{ast.unparse(node)}`")
        return None

    def _choice(self, node: ast.BoolOp) -> Value:
        """``and`` and ``or``, which stop at the first operand that decides."""
        stops = isinstance(node.op, ast.Or)
        found: Value | None = None
        for operand in node.values:
            value = self.value(operand)
            is_last = operand is node.values[-1]
            known = None if is_last and value is Kind.TENSOR else self.truth(operand)
            if known is not None and known is not stops and not is_last:
                continue
            found = value if found is None else joined(found, value)
            if known is stops:
                break
        assert found is not None
        return found

    def _either(self, node: ast.IfExp) -> Value:
        known = self.truth(node.test)
        if known is not None:
            return self.value(node.body if known else node.orelse)
        return joined(self.value(node.body), self.value(node.orelse))

    def _several(self, node: ast.Tuple | ast.List | ast.Set) -> Value:
        values = tuple(self.values(node.elts))
        if isinstance(node, ast.Tuple):
            return TupleOf(values)
        if not values:
            return ListOf(Known(None))
        return Kind.NUMBER if all(map(is_number, values)) else TupleOf(values)

    def _dictionary(self, node: ast.Dict) -> Value:
        parts: list[tuple[Any, Value]] = []
        for key, value in zip(node.keys, node.values, strict=True):
            name = None if key is None else self.value(key)
            parts.append((name.value if isinstance(name, Known) else None, self.value(value)))
        if all(isinstance(name, str) for name, _ in parts):
            return DictOf(tuple(parts))
        if all(name is not None and is_number(value) for name, value in parts):
            return Kind.NUMBER
        raise NotElementWise(f"`{ast.unparse(node)}` cannot be read")

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp) -> Value:
        before = dict(self.frame.names)
        over_parameters = 0
        for generator in node.generators:
            over_parameters += self.enter(generator.target, self.value(generator.iter))
            for test in generator.ifs:
                self.truth(test)
        self.loops_over_parameters += over_parameters
        element = self.value(node.elt)
        self.loops_over_parameters -= over_parameters
        self.frame.names = before
        if over_parameters or not is_number(element):
            return ListOf(element, over_parameters > 0)
        return Kind.NUMBER

    def enter(self, target: ast.expr, iterated: Value) -> bool:
        """Set the target of a loop; return whether it has a value for each parameter."""
        element, is_over_parameters = self.element(iterated)
        self.assign(target, element)
        return is_over_parameters

    def element(self, iterated: Value) -> tuple[Value, bool]:
        """The element that a loop goes over, and whether there is one for each parameter."""
        match iterated:
            case Kind.GROUPS:
                return Kind.GROUP, False
            case ListOf(element, is_over_parameters):
                return element, is_over_parameters
            case TupleOf(parts) if parts:
                element = parts[0]
                for part in parts[1:]:
                    element = joined(element, part)
                return element, False
            case Kind.NUMBER | Kind.COUNT | Known():
                return Kind.NUMBER, False
        raise NotElementWise(f"it goes over {described(iterated)}")

    def assign(self, target: ast.expr, value: Value) -> None:
        match target:
            case ast.Name():
                self.frame.names[target.id] = value
            case ast.Tuple() | ast.List():
                self._unpack(target.elts, value)
            case ast.Attribute():
                if self.value(target.value) is not Kind.OPTIMIZER:
                    raise NotElementWise(f"it sets {target.attr} of something")
                self._set("attribute", target.attr, value)
            case ast.Subscript():
                self.store(self.value(target.value), self.value(target.slice), value)
            case _:
                raise NotElementWise(f"`{ast.unparse(target)}` cannot be read")

    def _unpack(self, targets: list[ast.expr], value: Value) -> None:
        parts: tuple[Value, ...]
        if isinstance(value, TupleOf) and Kind.SEVERAL in value.parts:
            place, missing = value.parts.index(Kind.SEVERAL), len(targets) + 1 - len(value.parts)
            several = (Kind.NUMBER,) * missing
            value = TupleOf((*value.parts[:place], *several, *value.parts[place + 1 :]))
        if isinstance(value, TupleOf) and len(value.parts) == len(targets):
            parts = value.parts
        elif value in NUMBERS or isinstance(value, Known):
            parts = (Kind.NUMBER,) * len(targets)
        else:
            raise NotElementWise(f"it takes {described(value)} apart")
        for target, part in zip(targets, parts, strict=True):
            self.assign(target, part)

    def store(self, base: Value, index: Value, value: Value) -> None:
        """``base[index] = value``."""
        match base, index:
            case (Kind.STATE, Known(str(name))):
                self.settings.set_state(name, value)
            case (Kind.STATES, Kind.TENSOR) if isinstance(value, DictOf):
                for name, part in value.parts:
                    self.settings.set_state(name, part)
            case (Kind.GROUP, Known(str(name))) if name != "params":
                self._set("group", name, value)
            case _:
                raise NotElementWise(f"it sets a part of {described(base)}")

    def _set(self, where: str, name: str, value: Value) -> None:
        self.settings.set_setting(where, name, value, self.loops_over_parameters > 0)

    def _call(self, node: ast.Call) -> Value:
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
        is_of_two = name in ("max", "min") and values == [Kind.TENSOR] == every
        if not is_of_two and operations.METHODS.isdisjoint((name, name.removesuffix("_"))):
            raise NotElementWise(f"it calls .{name} of a tensor")
        self.settings.changes += name.endswith("_")
        return self.result([Kind.TENSOR, *every])

    def _of_number(self, base: Value, name: str, every: list[Value]) -> Value:
        is_element_wise = not operations.METHODS.isdisjoint((name, name.removesuffix("_")))
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
        is_of_two = is_one_of(called, operations.TORCH_OF_TWO) and values == [Kind.TENSOR] * 2
        if is_of_two or is_one_of(called, operations.FUNCTIONS):
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

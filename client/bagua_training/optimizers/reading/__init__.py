"""Whether the code of an optimizer treats each element by itself, found by reading what its step
does, in all functions that it calls.

An optimizer that treats each element by itself gives the same result for many parameters that are
stepped as one. Trying it shows only what it did in the steps that were tried; reading shows what it
can do in any: code behind ``if step > 20`` is read like all other. What is not known to be
element-wise is taken not to be.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import textwrap
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from bagua_client.torch_private.optimizer import unhooked_step
from bagua_training.optimizers.reading import operations
from bagua_training.optimizers.reading.expressions import Expressions, Frame, Words
from bagua_training.optimizers.reading.kinds import (
    Decided,
    Kind,
    Known,
    ListOf,
    NotElementWise,
    Settings,
    TupleOf,
    Value,
    described,
    has_changed,
    is_number,
    is_plain,
    joined,
)
from bagua_training.optimizers.reading.operations import is_one_of

_ELEMENT_WISE = "Adadelta Adagrad Adam Adamax AdamW ASGD NAdam RAdam RMSprop Rprop SGD"
ELEMENT_WISE = tuple(getattr(torch.optim, name) for name in _ELEMENT_WISE.split())
"""Torch's own optimizers, which are not read: each is tested."""
DEEPEST_CALL = 20
MOST_READINGS = 20
"""The most readings of the same code: each finds a kind of state or a setting more."""


@dataclass(frozen=True)
class Reading:
    """What was found.

    Attributes:
        reason: why the optimizer is not known to treat each element by itself; empty if it is.
        decided: the switches that this depends on.
        states: the names of the states that it makes; None: torch's code makes some, too.
        uses_data: it may change a gradient through its ``data``, which torch does not count.
    """

    reason: str
    decided: Decided = field(default_factory=dict)
    states: frozenset[str] | None = None
    uses_data: bool = False

    def is_current(self, optimizer: Optimizer) -> bool:
        """Whether the switches are as they were."""
        return not has_changed(optimizer, self.decided)

    def foreign_state(self, optimizer: Optimizer) -> str:
        """Why the states, which were loaded, may be of other code; empty if they are not."""
        names = {name for state in optimizer.state.values() for name in state}
        unknown = set() if self.states is None else names - self.states
        return f"it has the state {min(unknown)}, which its step does not make" if unknown else ""


def read(optimizer: Optimizer) -> Reading:
    """Read the step of an optimizer's class, with the settings that it has."""
    settings = Settings(optimizer)
    for _ in range(MOST_READINGS):
        before = settings.progress()
        reader = _Reader(settings)
        try:
            reader.read()
        except NotElementWise as error:
            return Reading(f"{error}{reader.place()}", settings.decided)
        if settings.progress() == before:
            try:
                settings.check_states()
            except NotElementWise as error:
                return Reading(str(error), settings.decided)
            states = None if reader.has_torchs else frozenset(settings.states)
            return Reading("", settings.decided, states, settings.uses_data)
    return Reading("its code cannot be read to an end", settings.decided)


class _Reader(Expressions):
    """Reads the step once."""

    def read(self) -> None:
        step = unhooked_step(type(self.settings.optimizer))
        owner = next(
            # Torch puts its wrapper, with the step of another class in it, into each class.
            each
            for each in reversed(type(self.settings.optimizer).__mro__)
            if "step" in vars(each) and unhooked_step(each) is step
        )
        self.frame = Frame(step, None, {})
        self._depth = 0
        self.has_torchs = False
        self.settings.changes = 0
        self.run(step, owner, [Kind.OPTIMIZER], {"closure": Kind.CLOSURE})

    def place(self) -> str:
        """The place in the code where reading stopped."""
        file = os.path.basename(self.frame.function.__code__.co_filename)
        return f", in line {self.line} of {file}" if self.line else ""

    def run(
        self,
        function: Callable[..., Any],
        owner: type | None,
        values: Sequence[Value],
        words: Words,
    ) -> Value:
        if owner is not None and owner in ELEMENT_WISE and function.__name__ == "step":
            return self._run_torchs(owner)
        function = _unwrapped(function)
        node = _source(function.__code__)
        if self._depth >= DEEPEST_CALL:
            raise NotElementWise(f"it calls {function.__name__} too deeply")
        before, line = self.frame, self.line
        self.frame = Frame(function, owner, _arguments(function, values, words))
        self._depth += 1
        if not self._block(node.body):
            self.frame.returned.append(Known(None))
        found = functools.reduce(joined, self.frame.returned)
        self._depth -= 1
        self.frame, self.line = before, line
        return found

    def _run_torchs(self, owner: type) -> Value:
        optimizer = type(self.settings.optimizer)
        own = set(vars(owner)) - {"__init__", "__setstate__", "step"}
        for name in own & {name for each in optimizer.__mro__ for name in vars(each)}:
            value, found = vars(owner)[name], getattr(optimizer, name)
            # torch.compile puts something around the functions of torch's own classes.
            if isinstance(value, types.FunctionType) and _unwrapped(found) is not _unwrapped(value):
                raise NotElementWise(f"it has a {name} of its own in place of torch's")
        self.has_torchs = True
        self.settings.changes += 1
        if self.loops_over_parameters:
            raise NotElementWise("it takes a step of torch's for each parameter")
        return Kind.NUMBER

    def _block(self, statements: Sequence[ast.stmt]) -> bool:
        """Read them in turn; returns whether what follows is never reached."""
        return any(self._statement(statement) for statement in statements)

    def _statement(self, node: ast.stmt) -> bool:
        self.line = self.frame.function.__code__.co_firstlineno + node.lineno - 1
        match node:
            case ast.Expr():
                self.value(node.value)
            case ast.Assign():
                value = self.value(node.value)
                for target in node.targets:
                    self.assign(target, value)
            case ast.AnnAssign():
                if node.value is not None:
                    self.assign(node.target, self.value(node.value))
            case ast.AugAssign():
                self._change(node)
            case ast.If():
                return self._branches(node)
            case ast.For() if not node.orelse:
                self._loop(node)
            case ast.With():
                return self._context(node)
            case ast.Return():
                value = Known(None) if node.value is None else self.value(node.value)
                self._leave(value)
                self.frame.returned.append(value)
                return True
            case ast.Break():
                self._leave(Known(None))
                return True
            case ast.Continue() | ast.Raise():
                return True
            case ast.Pass() | ast.Assert():
                pass
            case ast.Delete() if all(isinstance(each, ast.Name) for each in node.targets):
                pass
            case _:
                raise NotElementWise(f"`{ast.unparse(node).splitlines()[0]}` cannot be read")
        return False

    def _leave(self, value: Value) -> None:
        """A loop, or a function in it: it may look for something, but not do anything."""
        self.frame.has_left = True
        if self.frame.loops_over_parameters and not isinstance(value, Known):
            raise NotElementWise(f"it returns {described(value)} of the first parameters")

    def _change(self, node: ast.AugAssign) -> None:
        value = self.value(node.value)
        is_flag = isinstance(node.op, ast.BitOr) and isinstance(node.target, ast.Name)
        if is_flag and is_number(value):  # Whichever parameters it is true of.
            self.assign(node.target, Kind.NUMBER)
            return
        before = self.value(ast.parse(ast.unparse(node.target), mode="eval").body)
        found = self.result([before, value], type(node.op))
        if before is Kind.TENSOR:
            self.settings.changes += 1
        elif isinstance(before, ListOf) and isinstance(found, ListOf):
            before.element = found.element
        if isinstance(node.target, ast.Attribute) and before is Kind.TENSOR:
            return  # of p.data, in place
        if before is Kind.COUNT and found is Kind.NUMBER:
            found = Kind.COUNT
        self.assign(node.target, found)

    def _branches(self, node: ast.If) -> bool:
        known = self.truth(node.test)
        if known is not None:
            return self._block(node.body if known else node.orelse)
        names = self.frame.names
        self.frame.names = dict(names)
        is_left = self._block(node.body)
        after, self.frame.names = self.frame.names, dict(names)
        if self._block(node.orelse):
            self.frame.names = after
            return is_left
        if not is_left:
            self.frame.names = _merged(self.frame.names, after)
        return False

    def _loop(self, node: ast.For) -> None:
        iterated = self.value(node.iter)
        is_over_parameters = self.element(iterated)[1]
        assigned = {
            found.id
            for each in (node.target, *node.body)
            for found in ast.walk(each)
            if isinstance(found, ast.Name) and isinstance(found.ctx, ast.Store)
        }
        before, changes = dict(self.frame.names), self.settings.changes
        self.frame.has_left = False
        for name in assigned & before.keys():
            is_kept = not is_over_parameters and is_number(before[name])
            self.frame.names[name] = Kind.NUMBER if is_kept else Kind.CARRIED
        self.loops_over_parameters += is_over_parameters
        self.frame.loops_over_parameters += is_over_parameters
        self.enter(node.target, iterated)
        self._block(node.body)
        if is_over_parameters and self.frame.has_left and self.settings.changes > changes:
            raise NotElementWise("it leaves a loop before it has seen all parameters")
        self.loops_over_parameters -= is_over_parameters
        self.frame.loops_over_parameters -= is_over_parameters
        for name in assigned:
            value = self.frame.names.get(name, Kind.CARRIED)
            is_kept = isinstance(value, Known) if is_over_parameters else is_number(value)
            is_kept = is_kept and is_number(before.get(name, Kind.NUMBER))
            self.frame.names[name] = Kind.NUMBER if is_kept else Kind.CARRIED

    def _context(self, node: ast.With) -> bool:
        for item in node.items:
            call = item.context_expr
            found = self.value(call.func) if isinstance(call, ast.Call) else None
            if not isinstance(found, Known) or not is_one_of(
                found.value, operations.TORCH_CONTEXTS
            ):
                raise NotElementWise(f"`with {ast.unparse(call)}` cannot be read")
        return self._block(node.body)


def _merged(first: dict[str, Value], second: dict[str, Value]) -> dict[str, Value]:
    """The names after either of two branches."""
    found = {**first, **second}
    for name in first.keys() & second.keys():
        try:
            found[name] = joined(first[name], second[name])
        except NotElementWise:
            found[name] = Kind.CARRIED  # Only who looks at it has to know.
    return found


def _arguments(
    function: Callable[..., Any], values: Sequence[Value], words: Words
) -> dict[str, Value]:
    signature = inspect.signature(function)
    words = {
        name: value
        for name, value in words.items()
        if value is not Kind.CLOSURE or name in signature.parameters
    }
    try:
        bound = signature.bind(*values, **words)
    except TypeError as error:
        raise NotElementWise(f"it calls {function.__name__}: {error}") from error
    found: dict[str, Value] = {}
    for name, parameter in signature.parameters.items():
        if name in bound.arguments:
            value = bound.arguments[name]
            if parameter.kind is parameter.VAR_POSITIONAL:
                value = TupleOf(tuple(value))
            elif parameter.kind is parameter.VAR_KEYWORD:
                raise NotElementWise(f"the arguments of {function.__name__} cannot be read")
            found[name] = value
        elif parameter.default is not parameter.empty and is_plain(parameter.default):
            found[name] = Known(parameter.default)
    return found


def _unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function without what torch has put around it.

    Raises:
        NotElementWise: somebody else has put something around it.
    """
    while hasattr(function, "__wrapped__"):
        module = getattr(function, "__globals__", {}).get("__name__", "")
        if not module.startswith("torch."):
            raise NotElementWise(f"something is put around its {function.__name__}")
        function = function.__wrapped__
    if not isinstance(function, types.FunctionType):
        raise NotElementWise(
            f"its {getattr(function, '__name__', 'step')} is not written in Python"
        )
    return function


@functools.lru_cache(maxsize=1000)
def _source(code: types.CodeType) -> ast.FunctionDef:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError, TypeError) as error:
        raise NotElementWise(f"the source of its {code.co_name} is not to be had") from error
    node = tree.body[0]
    if not isinstance(node, ast.FunctionDef) or node.name != code.co_name:
        raise NotElementWise(f"its {code.co_name} is not written as a function")
    return node

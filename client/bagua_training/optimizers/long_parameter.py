"""Parameters that lie one after the other in memory, as the one parameter that is stepped."""

from __future__ import annotations

import copy
import operator
from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from bagua_training.optimizers.contiguity import is_dense, joined, views, whole

State = MutableMapping[Any, dict[str, Any]]
"""An optimizer's state: what it keeps of each parameter, by name."""
Scalar = int | float | str | None


def is_joinable(parameter: Tensor) -> bool:
    """Whether others can follow it in memory; tensors of a class of their own may be elsewhere.

    Complex ones are not: optimizers look at them through views of another shape.
    """
    is_plain = type(parameter) in (Tensor, Parameter) and parameter.layout is torch.strided
    is_plain = is_plain and not parameter.is_complex()
    return is_plain and parameter.ndim > 0 and parameter.numel() > 0 and is_dense(parameter)


def kind(parameter: Tensor, state: Mapping[str, Any]) -> Hashable:
    """Return the kind of a parameter: those of one kind can be stepped as one; None: it is stepped
    alone.
    """
    gradient = parameter.grad
    if gradient is None or gradient.layout is not torch.strided or not is_joinable(parameter):
        return None
    kept: list[Hashable] = []
    for name, value in state.items():
        if _is_part(value, parameter):
            kept.append((name, value.dtype))
        elif isinstance(value, Tensor) and value.numel() == 1:
            kept.append((name, value.device, value.item()))
        elif isinstance(value, Scalar):
            kept.append((name, value))
        else:
            return None
    return parameter.dtype, parameter.device, gradient.dtype, parameter.requires_grad, tuple(kept)


def parts_of(parameters: Sequence[Tensor], state: State) -> list[list[Tensor]]:
    """Return, for each state with a value for each element, that state of all the parameters."""
    first = state.get(parameters[0], {})
    names = [name for name, value in first.items() if _is_part(value, parameters[0])]
    return [[state[parameter][name] for parameter in parameters] for name in names]


def _is_part(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


class LongParameter:
    """Parameters of one kind that follow one another, as one over the same memory.

    Their states become parts of its state, too.

    Attributes:
        parameters: in the order of their memory.
        parameter: all of them, shape (elements,).
        state: what the optimizer keeps of it.
    """

    def __init__(self, parameters: Sequence[Parameter], state: State) -> None:
        self.parameters = parameters
        self._like = [parameter.detach() for parameter in parameters]
        weights = joined(self._like)
        assert weights is not None, "the parameters do not follow one another"
        self.parameter = Parameter(weights, parameters[0].requires_grad)
        self.state: dict[str, Any] = {}
        self._addresses = [weight.data_ptr() for weight in self._like]
        self._kind = self._kind_of(parameters[0])
        self._wholes: dict[str, Tensor] = {}
        self._parts: dict[str, list[Tensor]] = {}
        self._counts: dict[str, list[tuple[Tensor, int]]] = {}
        self._gradient: tuple[Tensor, int]
        states = [state.get(parameter, {}) for parameter in parameters]
        for name, value in states[0].items():
            if _is_part(value, parameters[0]):
                self.state[name] = whole([each[name] for each in states], self._like)
                self._give_parts(name, states)
            elif isinstance(value, Tensor):
                self.state[name] = value.clone()
                self._note_counts(name, states)
            else:
                self.state[name] = value

    @staticmethod
    def _kind_of(parameter: Parameter) -> Any:
        gradient = parameter.grad
        if gradient is None:
            return None
        return gradient.dtype, gradient.layout, parameter.requires_grad

    def is_current(self, state: State) -> bool:
        """Whether all of them still have gradients, lie where they did, and have the states that
        it gave them."""
        if any(self._kind_of(parameter) != self._kind for parameter in self.parameters):
            return False
        if [parameter.data_ptr() for parameter in self.parameters] != self._addresses:
            return False
        states = [state.get(parameter, {}) for parameter in self.parameters]
        if any(len(each) != len(self.state) for each in states):
            return False
        for name, value in self.state.items():
            found = [each.get(name) for each in states]
            if name in self._parts:
                if not all(map(operator.is_, found, self._parts[name])):
                    return False
            elif isinstance(value, Tensor):
                # By versions, as for values of a GPU we would have to wait.
                if any(
                    each is not count or count._version != version
                    for each, (count, version) in zip(found, self._counts[name], strict=True)
                ):
                    return False
            elif not isinstance(value, Scalar) or any(each != value for each in found):
                return False
        return True

    def take_gradients(self, is_counted: bool) -> None:
        """Take the gradients, copied unless they follow one another as the weights do.

        Args:
            is_counted: torch counts every change that the step may make to them.
        """
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        self.parameter.grad = whole(gradients, self._like)
        version = self.parameter.grad._version if is_counted else -1
        self._gradient = (self.parameter.grad, version)

    def give_back(self, made: dict[str, Any] | None, state: State) -> None:
        """Give back after a step: each parameter gets its part of the states that the step has
        ``made``.

        None: it has looked at no state. Who looks and makes none leaves an empty one.
        """
        self._give_gradients()
        if made is None:
            return
        self.state = made
        states = [state[parameter] for parameter in self.parameters]
        for name, value in made.items():
            if isinstance(value, Tensor) and value.shape == self.parameter.shape:
                if self._wholes.get(name) is not value:
                    self._give_parts(name, states)
            elif isinstance(value, Tensor):
                found = [each[name] for each in states if isinstance(each.get(name), Tensor)]
                if len(found) == len(states):
                    torch._foreach_copy_(found, [value] * len(found))
                else:
                    for each in states:
                        each[name] = value.clone()
                self._note_counts(name, states)
            else:
                for each in states:
                    each[name] = value if isinstance(value, Scalar) else copy.deepcopy(value)

    def _give_gradients(self) -> None:
        """Give back gradients that the step changed, as it may when it adds weight decay."""
        gradient, self.parameter.grad = self.parameter.grad, None
        before, version = self._gradient
        if gradient is None:
            for parameter in self.parameters:
                parameter.grad = None
        elif gradient is not before or gradient._version != version:
            found = [p.grad for p in self.parameters if p.grad is not None]
            torch._foreach_copy_(found, views(gradient, self._like))

    def _note_counts(self, name: str, states: Sequence[dict[str, Any]]) -> None:
        """Remember states of one number, in which all are alike, to see whether they change."""
        self._counts[name] = [(each[name], each[name]._version) for each in states]

    def _give_parts(self, name: str, states: Sequence[dict[str, Any]]) -> None:
        self._wholes[name] = self.state[name]
        self._parts[name] = views(self.state[name], self._like)
        for each, part in zip(states, self._parts[name], strict=True):
            each[name] = part

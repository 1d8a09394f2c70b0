"""Tensors that lie one after the other in memory, and the one tensor, or the one parameter that is
stepped, that they are together."""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

State = MutableMapping[Any, dict[str, Any]]
"""An optimizer's state: what it keeps of each parameter, by name."""
Scalar = int | float | str | None


def calculate_mutual_groups(lists: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    """Return which places hold tensors that follow one another in memory, alike in each of the
    lists.

    Args:
        lists: equally long; in each, a place's tensor may be another one.

    Returns:
        The places of two tensors or more, in the order of their addresses. What follows one another
        further in one list than in another is in none: that is Bagua's rule.
    """
    of_lists = [_stretches(tensors) for tensors in lists]
    return [
        list(places)
        for places in (of_lists[0] if of_lists else [])
        if len(places) > 1 and all(places in other for other in of_lists[1:])
    ]


def _stretches(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """The stretches, as long as they can be."""
    found: list[list[int]] = []
    before: tuple[object, ...] = ()
    for place in sorted(range(len(tensors)), key=lambda place: tensors[place].data_ptr()):
        tensor = tensors[place]
        begin, kind = tensor.data_ptr(), (tensor.untyped_storage().data_ptr(), tensor.dtype)
        if before == (begin, *kind):
            found[-1].append(place)
        else:
            found.append([place])
        before = (begin + tensor.numel() * tensor.element_size(), *kind)
    return [tuple(places) for places in found]


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a stretch of memory, in whichever order of the dimensions."""
    expected = 1
    dimensions = zip(tensor.stride(), tensor.size(), strict=True)
    for stride, size in sorted(each for each in dimensions if each[1] != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def share_memory(tensors: Sequence[Tensor]) -> bool:
    """Whether some of them, which are dense, have elements in common."""
    ordered = sorted(tensors, key=Tensor.data_ptr)
    return any(
        first.data_ptr() + first.numel() * first.element_size() > second.data_ptr()
        for first, second in itertools.pairwise(ordered)
    )


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return all tensors as one, over the same memory, shape (elements,); None where they do not
    follow one another.

    They are dense and of one type.
    """
    first = tensors[0]
    begin = end = first.data_ptr()
    size = first.element_size()
    for tensor in tensors:
        if tensor.data_ptr() != end:
            return None
        end += tensor.numel() * size
    storage = first.untyped_storage()
    if end > storage.data_ptr() + storage.nbytes():
        return None  # neighbours by chance
    return first.detach().as_strided(((end - begin) // size,), (1,))


def views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The parts of ``flat`` with the shapes and strides of ``like``, which are dense."""
    parts = torch.split(flat, [tensor.numel() for tensor in like])
    return [
        part.as_strided(tensor.size(), tensor.stride())
        for part, tensor in zip(parts, like, strict=True)
    ]


def flattened(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> Tensor:
    """A copy of all of them as one, each in the memory order of its part in ``like``."""
    return torch.cat([_in_order(*pair) for pair in zip(tensors, like, strict=True)])


def _in_order(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the tensor's elements in the memory order of ``like``, shape (elements,)."""
    if tensor.stride() != like.stride():
        ordered = torch.empty_strided(
            like.size(), like.stride(), dtype=tensor.dtype, device=tensor.device
        )
        tensor = ordered.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def whole(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> Tensor:
    """The tensors as one; over the same memory if they follow one another there as ``like`` do."""
    found = joined(tensors)
    if found is None or any(a.stride() != b.stride() for a, b in zip(tensors, like, strict=True)):
        return flattened(tensors, like)
    return found


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

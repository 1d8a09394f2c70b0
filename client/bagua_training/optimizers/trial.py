"""A step of a few parameters' copies, both ways: is the fused result the plain one?

The result is all that a step may change: weights, gradients, states, settings and attributes.
"""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from bagua_client.torch_private.optimizer import clear_step_hooks, is_torchs, unhooked_step
from bagua_training.optimizers.contiguity import Scalar

MOST_ELEMENTS = 1 << 20
"""Most elements of the copies that are compared, which then need little memory."""
TOLERANCE = 4.0
"""The tolerance of a result, in units of its type's rounding at the largest value that took
part."""

Closure = Callable[[], Any]
Step = Callable[[Optimizer, Closure | None], object]


def step_plainly(optimizer: Optimizer, closure: Closure | None) -> Any:
    """The step of its class; no hooks are called."""
    return unhooked_step(type(optimizer))(optimizer, *([] if closure is None else [closure]))


def copy_of(optimizer: Optimizer) -> Optimizer:
    """Copy an optimizer with its settings, groups and states; the copy's step calls no hooks."""
    found: Optimizer = object.__new__(type(optimizer))
    vars(found).update(vars(optimizer))
    for name in own_names(optimizer):
        vars(found).pop(name, None)
    clear_step_hooks(found)
    return found


def settings_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return what somebody else's optimizer may keep in itself, such as a counter."""
    others = {"state", "param_groups", "defaults", *own_names(optimizer)}
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in others and not is_torchs(name)
    }


def own_names(optimizer: Optimizer) -> set[str]:
    """The names of the attributes that fusing has given to it."""
    names = {name for name in vars(optimizer) if name.startswith("_bagua_")}
    return {"step", "fuse_step", "__reduce_ex__", *names}


def known_loss(optimizer: Optimizer, loss: Any, closure: Closure) -> Closure:
    """The closure of which the result is known: it is called only where a step asks for the loss
    of other weights or gradients, as those do that look ahead."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [_versions(parameter) for parameter in parameters]

    def known() -> Any:
        is_changed = any(
            _versions(parameter) != versions
            for parameter, versions in zip(parameters, before, strict=True)
        )
        return closure() if is_changed else loss

    return known


def _versions(parameter: Parameter) -> tuple[int, ...]:
    """Return versions that change with the parameter or its gradient."""
    gradient = parameter.grad
    if gradient is None:
        return (parameter._version,)
    return parameter._version, id(gradient), gradient._version


def difference(
    optimizer: Optimizer, chosen: Sequence[Sequence[Parameter]], fused: Step, loss: Closure | None
) -> str:
    """Why a fused step would not do what a plain one does; empty if it would.

    Nothing of the optimizer is changed, nor are the random numbers that come next.

    Args:
        chosen: by group, the parameters that would be fused.
        fused: a fused step.
        loss: what both are given as their closure.
    """
    try:
        samples = [_sample(parameters) for parameters in chosen]
        twins = [_twin(optimizer, samples) for _ in range(2)]
        for twin, step in zip(twins, (step_plainly, fused), strict=True):
            with _same_random_numbers(samples):
                step(twin, None if loss is None else known_loss(twin, loss(), _refuse))
        return _first_difference(*twins)
    except Exception as error:
        return f"a step of copies of its parameters raised {type(error).__name__}: {error}"


def _first_difference(plain: Optimizer, fused: Optimizer) -> str:
    """Return where a fused step of a copy differs from a plain step of its twin; empty: nowhere."""
    both = [[p for group in twin.param_groups for p in group["params"]] for twin in (plain, fused)]
    if not plain.state.keys() <= set(both[0]):
        return "it keeps a state that belongs to no parameter"
    for expected, found in zip(*both, strict=True):
        states = plain.state.get(expected, {}), fused.state.get(found, {})
        for name, value in states[0].items():
            if not isinstance(value, Scalar) and not _is_of_size(value, expected):
                return f"its state {name} is neither a number nor of the shape of its parameter"
        pairs = {"result": (found, expected), "gradient": (found.grad, expected.grad)}
        pairs |= {f"state {name}": (states[1].get(name), states[0][name]) for name in states[0]}
        wrong = [name for name, pair in pairs.items() if not _is_alike(*pair)]
        is_looked_at = (expected in plain.state) is (found in fused.state)
        if wrong or states[0].keys() != states[1].keys() or not is_looked_at:
            what = wrong[0] if wrong else "state"
            return (
                f"the fused {what} would differ from the plain one, for a parameter of shape "
                f"{tuple(found.shape)}. It seems not to treat each element by itself"
            )
    kept = [
        ([{**group, "params": None} for group in twin.param_groups], settings_of(twin))
        for twin in (plain, fused)
    ]
    return "" if _is_alike(*kept) else "the fused step would change its settings in another way"


def _is_of_size(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and (value.shape == parameter.shape or value.numel() == 1)


def _refuse() -> NoReturn:
    raise RuntimeError("it calls the closure in the middle of its step")


def _sample(parameters: Sequence[Parameter]) -> list[Parameter]:
    """The smallest of each shape, two at least; in the same order."""
    by_shape = {parameter.shape: parameter for parameter in parameters}
    found: set[Parameter] = set()
    elements = 0
    for parameter in sorted([*by_shape.values(), *parameters], key=Parameter.numel):
        if len(found) >= 2 and elements + parameter.numel() > MOST_ELEMENTS:
            break
        elements += parameter.numel() if parameter not in found else 0
        found.add(parameter)
    return [parameter for parameter in parameters if parameter in found]


def _twin(optimizer: Optimizer, samples: Sequence[Sequence[Parameter]]) -> Optimizer:
    """A copy of the optimizer that has copies of these parameters alone, by group."""
    found = copy_of(optimizer)
    vars(found).update(copy.deepcopy(settings_of(optimizer)))
    found.state = defaultdict(dict)
    found.param_groups = []
    for group, parameters in zip(optimizer.param_groups, samples, strict=True):
        copies = []
        for parameter in parameters:
            twin = Parameter(parameter.detach().clone(), parameter.requires_grad)
            twin.grad = None if parameter.grad is None else parameter.grad.detach().clone()
            if parameter in optimizer.state:
                found.state[twin] = _state_copy(optimizer.state[parameter])
            copies.append(twin)
        settings = {key: value for key, value in group.items() if key != "params"}
        found.param_groups.append({**copy.deepcopy(settings), "params": copies})
    return found


def _state_copy(state: Mapping[str, Any]) -> dict[str, Any]:
    # A deep copy of a part would be one of the whole memory that it is a part of.
    return {
        name: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in state.items()
    }


@contextmanager
def _same_random_numbers(samples: Sequence[Sequence[Parameter]]) -> Iterator[None]:
    devices = {p.device for parameters in samples for p in parameters if p.is_cuda}
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(state)


def _is_alike(found: Any, plain: Any) -> bool:
    """Whether two values are equal; tensors, but for rounding."""
    if isinstance(plain, list | tuple):
        return len(found) == len(plain) and all(map(_is_alike, found, plain))
    if isinstance(plain, dict):
        return found.keys() == plain.keys() and all(_is_alike(found[k], plain[k]) for k in plain)
    if isinstance(plain, Scalar):
        both_are_nan = plain != plain and found != found
        return type(found) is type(plain) and (both_are_nan or bool(found == plain))
    if not isinstance(plain, Tensor):
        return type(found) is type(plain)
    if not isinstance(found, Tensor) or (found.shape, found.dtype) != (plain.shape, plain.dtype):
        return False
    if torch.equal(found, plain):
        return True
    if not plain.is_floating_point():
        return False
    rounding = TOLERANCE * torch.finfo(plain.dtype).eps
    largest = float(plain.detach().abs().nan_to_num(posinf=0).max())
    return torch.allclose(found, plain, rounding, rounding * largest, equal_nan=True)

"""A step of a few parameters' copies, both ways: is the fused result the plain one?"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

MOST_ELEMENTS = 1 << 20
"""So that the copies that are compared need little memory."""
TOLERANCE = 4.0
"""Of a result, in units of its type's rounding at the largest value that took part."""

Closure = Callable[[], Any]
Step = Callable[[Optimizer, Closure | None], object]


def step_plainly(optimizer: Optimizer, closure: Closure | None) -> Any:
    """The step of its class, without the hooks that torch has put around it."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    return step(optimizer, *([] if closure is None else [closure]))


def copy_of(optimizer: Optimizer) -> Optimizer:
    """With the same settings, groups and states; its step calls no hooks."""
    found: Optimizer = object.__new__(type(optimizer))
    vars(found).update(vars(optimizer))
    vars(found).pop("step", None)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(found, name, OrderedDict())
    return found


def settings_of(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer of somebody else's may keep in itself, such as a counter."""
    ours = ("state", "param_groups", "defaults", "step", "fuse_step")
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in ours and not name.startswith(("_optimizer_", "_bagua_", "_opt_called"))
    }


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
    """Another one after it, or its gradient, has changed."""
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
    except Exception as error:
        return f"a step of copies of its parameters raised {type(error).__name__}: {error}"
    plain, other = ([p for group in twin.param_groups for p in group["params"]] for twin in twins)
    for expected, found in zip(plain, other, strict=True):
        if not _is_alike(found, expected):
            return (
                "the fused result would differ from the plain one, for a parameter of shape "
                f"{tuple(found.shape)}. It seems not to treat each element by itself"
            )
    return ""


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
    with torch.random.fork_rng(devices):
        yield


def _is_alike(found: Tensor, plain: Tensor) -> bool:
    if torch.equal(found, plain):
        return True
    rounding = TOLERANCE * torch.finfo(plain.dtype).eps
    largest = float(plain.detach().abs().nan_to_num(posinf=0).max())
    return torch.allclose(found, plain, rounding, rounding * largest, equal_nan=True)

"""One step over many small tensors at once, for optimizers that loop over their parameters.

An optimizer written as a loop starts a few kernels for each tensor, and with hundreds of small
tensors the starting takes longer than the work. Where the tensors follow one another in memory,
they are one long tensor to every operation that works element by element; so the optimizer's own
``step`` is called on a copy of it that has that long tensor as its parameter. This is Bagua's idea.

It is right only for optimizers that look at each element by itself. Those that take a norm of each
tensor, as LAMB does, or depend on shapes would compute something else; so what the fused step did
is compared with the plain one in some of the first steps, and the optimizer is left plain where
they differ.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from bagua_client.optimizers.contiguity import (
    calculate_mutual_groups,
    flattened,
    is_dense,
    joined,
    views,
)

logger = logging.getLogger(__name__)

CHECKED_STEPS = frozenset((1, 2, 10, 100))
"""In the first, states are made; a later one may show what an optimizer does only now and then."""
MOST_CHECKED_ELEMENTS = 1 << 20
"""So that the copies that are compared need little memory."""
TOLERANCE = 4.0
"""Of a result, in units of its type's rounding at the largest value that took part."""

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def fuse_optimizer(
    optimizer: AnyOptimizer,
    do_flatten: bool = True,
    check_flatten: bool = True,
    replace_step: bool = False,
) -> AnyOptimizer:
    """Give an optimizer ``fuse_step``, which does what ``step`` does in fewer kernels.

    Args:
        do_flatten: move weights and states so that they follow one another. Otherwise only what
            does by itself is fused, gradients included.
        check_flatten: look in each step whether somebody has moved the weights since.
        replace_step: ``step`` is ``fuse_step``, too: for who calls it in your place, such as
            ``torch.amp.GradScaler``, Lightning or Accelerate.

    Returns:
        The same optimizer. Its ``state_dict`` is that of an unfused one.

    Raises:
        RuntimeError: it is fused already.
        ValueError: it cannot be: its ``step`` needs a closure, as LBFGS's does.
    """
    if is_fused_optimizer(optimizer):
        raise RuntimeError("this optimizer is fused already")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} calls the closure itself, so nothing is fused"
        )
    fused = FusedStep(optimizer, do_flatten, check_flatten)
    found: Any = optimizer
    found._bagua_fused_step = fused
    found._bagua_fused_optimizer = fused.shadow
    found._bagua_fused_count = 0
    found._bagua_check_flatten = check_flatten
    found.fuse_step = MethodType(_fuse_step, optimizer)
    if replace_step:
        # A method, as learning rate schedulers wrap its function.
        found.step = MethodType(_fuse_step, optimizer)
    return optimizer


def is_fused_optimizer(optimizer: Optimizer) -> bool:
    """Whether :func:`fuse_optimizer` was called with it."""
    return hasattr(optimizer, "_bagua_fused_step")


def _fuse_step(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
    """One optimizer step, fused where that is possible.

    Args:
        closure: computes the loss and the gradients anew; called once.

    Returns:
        What the closure returns.
    """
    optimizer._opt_called = True  # what learning rate schedulers ask for
    fused: FusedStep = optimizer._bagua_fused_step
    if fused.refusal:
        return type(optimizer).step(optimizer, *([] if closure is None else [closure]))
    for hook in optimizer._optimizer_step_pre_hooks.values():
        hook(optimizer, (), {})
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    optimizer._bagua_fused_count += fused()
    for hook in optimizer._optimizer_step_post_hooks.values():
        hook(optimizer, (), {})
    return loss


class FusedStep:
    """The fused step of one optimizer.

    Attributes:
        shadow: a copy of it that steps over the long tensors.
        refusal: why it is left plain; empty while it is not.
    """

    def __init__(self, optimizer: Optimizer, do_flatten: bool, check_flatten: bool) -> None:
        self.optimizer = optimizer
        self.shadow = _copy_of(optimizer)
        self.do_flatten = do_flatten
        self.check_flatten = check_flatten
        self.refusal = ""
        self.steps = 0
        self._long: dict[tuple[int, int], Parameter] = {}
        if do_flatten:
            self._flatten_weights()

    @torch.no_grad()
    def __call__(self) -> int:
        """Returns in how many parameter groups something was fused."""
        if self.do_flatten and self.check_flatten:
            self._flatten_weights()
        self.steps += 1
        runs = [self._runs_of(group) for group in self.optimizer.param_groups]
        if self.steps in CHECKED_STEPS and self._is_refused(runs):
            plain = _copy_of(self.optimizer)
            type(plain).step(plain)
            vars(self.optimizer).update(_settings_of(plain))
            return 0
        self._step(runs)
        return sum(1 for of_group in runs if of_group)

    def _flatten_weights(self) -> None:
        """Those of a group, type and device that do not follow one another are moved."""
        for group in self.optimizer.param_groups:
            kinds: dict[Any, list[Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.layout is torch.strided and is_dense(parameter):
                    kinds[parameter.dtype, parameter.device].append(parameter)
            for parameters in kinds.values():
                weights = [parameter.detach() for parameter in parameters]
                if joined(weights) is None:
                    flat = flattened(weights, weights)
                    for parameter, view in zip(parameters, views(flat, weights), strict=True):
                        parameter.data = view

    def _runs_of(self, group: Mapping[str, Any]) -> list[list[Parameter]]:
        """Parameters with gradients that can be stepped as one, in the order of their memory."""
        state = self.optimizer.state
        kinds: dict[Any, list[Parameter]] = defaultdict(list)
        for parameter in group["params"]:
            kind = _kind(parameter, state.get(parameter, {}))
            if kind is not None:
                kinds[kind].append(parameter)
        found: list[list[Parameter]] = []
        for parameters in kinds.values():
            lists: list[list[Tensor]] = [[parameter.detach() for parameter in parameters]]
            if not self.do_flatten:
                lists.append([p.grad for p in parameters if p.grad is not None])
                first = state.get(parameters[0], {})
                for name in (
                    name for name, value in first.items() if _is_part(value, parameters[0])
                ):
                    lists.append([state[parameter][name] for parameter in parameters])
            groups = calculate_mutual_groups(lists)
            found += [[parameters[place] for place in places] for places in groups]
        return found

    def _step(self, runs: Sequence[Sequence[Sequence[Parameter]]]) -> None:
        """The shadow's; then what it did to states and settings is the optimizer's."""
        real, shadow = self.optimizer, self.shadow
        vars(shadow).update(_settings_of(real))
        shadow.state = defaultdict(dict)
        shadow.param_groups = []
        longs: list[tuple[Parameter, Sequence[Parameter]]] = []
        for group, of_group in zip(real.param_groups, runs, strict=True):
            within = {parameter for run in of_group for parameter in run}
            alone = [parameter for parameter in group["params"] if parameter not in within]
            for parameter in alone:
                if parameter.grad is not None:
                    shadow.state[parameter] = real.state[parameter]
            mine = [self._as_one(run) for run in of_group]
            longs += zip(mine, of_group, strict=True)
            shadow.param_groups.append({**group, "params": [*mine, *alone]})
        type(real).step(shadow)
        for long, run in longs:
            self._take_back(shadow.state[long], run)
            long.grad = None
        for group, done in zip(real.param_groups, shadow.param_groups, strict=True):
            group.update({key: value for key, value in done.items() if key != "params"})
        vars(real).update(_settings_of(shadow))

    def _as_one(self, run: Sequence[Parameter]) -> Parameter:
        """A run as one parameter, with its gradient, and with its state in the shadow."""
        like = [parameter.detach() for parameter in run]
        weights = _whole(like, like)
        key = weights.data_ptr(), len(weights)
        long = self._long.get(key)
        if (
            long is None
            or long.untyped_storage().data_ptr() != weights.untyped_storage().data_ptr()
        ):
            # The same object each time, as some optimizers remember it.
            long = self._long[key] = Parameter(weights, run[0].requires_grad)
        long.grad = _whole([p.grad for p in run if p.grad is not None], like)
        states = [self.optimizer.state.get(parameter, {}) for parameter in run]
        of_long = self.shadow.state[long]
        for name, value in states[0].items():
            if _is_part(value, run[0]):
                of_long[name] = _whole([state[name] for state in states], like)
            else:
                of_long[name] = value.clone() if isinstance(value, Tensor) else value
        return long

    def _take_back(self, made: Mapping[str, Any], run: Sequence[Parameter]) -> None:
        """Give each parameter its part of the states that the shadow has."""
        elements = sum(parameter.numel() for parameter in run)
        states = [self.optimizer.state[parameter] for parameter in run]
        for name, value in made.items():
            before = [state.get(name) for state in states]
            if not isinstance(value, Tensor):
                for state in states:
                    state[name] = value
            elif value.shape != (elements,):
                if any(not isinstance(each, Tensor) for each in before):
                    for state in states:
                        state[name] = value.clone()
                else:
                    torch._foreach_copy_(before, [value] * len(before))
            elif before[0] is None or before[0].data_ptr() != value.data_ptr():
                for state, view in zip(states, views(value, run), strict=True):
                    state[name] = view

    def _is_refused(self, runs: Sequence[Sequence[Sequence[Parameter]]]) -> bool:
        """Whether a fused step of some of the parameters, or rather of copies, differs from a plain
        one. It changes nothing."""
        chosen = [[p for run in of_group for p in _sample(run)] for of_group in runs]
        plain, fused = (_twin(self.optimizer, chosen) for _ in range(2))
        type(self.optimizer).step(plain)
        apart = FusedStep(fused, do_flatten=True, check_flatten=False)
        apart._step([apart._runs_of(group) for group in fused.param_groups])
        for ours, theirs in zip(fused.param_groups, plain.param_groups, strict=True):
            for found, expected in zip(ours["params"], theirs["params"], strict=True):
                if not _is_alike(found, expected):
                    self.refusal = (
                        f"{type(self.optimizer).__name__} is not fused: in step {self.steps} the "
                        "fused result would differ from the plain one, for a parameter of shape "
                        f"{tuple(found.shape)}. It seems not to treat each element by itself. All "
                        "its steps remain plain."
                    )
                    logger.warning(self.refusal)
                    return True
        return False


def _copy_of(optimizer: Optimizer) -> Optimizer:
    """With the same settings, groups and states; its step calls no hooks."""
    found: Optimizer = object.__new__(type(optimizer))
    vars(found).update(vars(optimizer))
    vars(found).pop("step", None)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(found, name, OrderedDict())
    return found


def _settings_of(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer of somebody else's may keep in itself, such as a counter."""
    ours = ("state", "param_groups", "defaults", "step", "fuse_step")
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in ours and not name.startswith(("_optimizer_", "_bagua_", "_opt_called"))
    }


def _sample(run: Sequence[Parameter]) -> list[Parameter]:
    """The smallest of each shape, two at least; of the run's order."""
    by_shape = {parameter.shape: parameter for parameter in run}
    chosen = sorted([*by_shape.values(), *run], key=Parameter.numel)
    found: set[Parameter] = set()
    elements = 0
    for parameter in chosen:
        if len(found) >= 2 and elements + parameter.numel() > MOST_CHECKED_ELEMENTS:
            break
        elements += parameter.numel() if parameter not in found else 0
        found.add(parameter)
    return [parameter for parameter in run if parameter in found]


def _twin(optimizer: Optimizer, chosen: Sequence[Sequence[Parameter]]) -> Optimizer:
    """A copy of the optimizer that has copies of these parameters alone, by group."""
    found = _copy_of(optimizer)
    vars(found).update(copy.deepcopy(_settings_of(optimizer)))
    found.state = defaultdict(dict)
    found.param_groups = []
    for group, parameters in zip(optimizer.param_groups, chosen, strict=True):
        copies = []
        for parameter in parameters:
            twin = Parameter(parameter.detach().clone(), parameter.requires_grad)
            twin.grad = None if parameter.grad is None else parameter.grad.detach().clone()
            if parameter in optimizer.state:
                found.state[twin] = copy.deepcopy(optimizer.state[parameter])
            copies.append(twin)
        settings = {key: value for key, value in group.items() if key != "params"}
        found.param_groups.append({**copy.deepcopy(settings), "params": copies})
    return found


def _kind(parameter: Parameter, state: Mapping[str, Any]) -> Any:
    """Only parameters of one kind are stepped as one; None: this one is stepped alone."""
    gradient = parameter.grad
    if gradient is None or gradient.layout is not torch.strided or not parameter.ndim:
        return None
    if not is_dense(parameter) or not parameter.numel():
        return None
    kept: list[tuple[str, Any]] = []
    for name, value in state.items():
        if _is_part(value, parameter):
            kept.append((name, value.dtype))
        elif isinstance(value, Tensor):
            # Of a GPU's numbers we would have to wait for each.
            if value.numel() != 1 or value.device.type != "cpu":
                return None
            kept.append((name, value.item()))
        elif isinstance(value, int | float | str | None):
            kept.append((name, value))
        else:
            return None
    return parameter.dtype, parameter.device, gradient.dtype, tuple(kept)


def _is_part(value: Any, parameter: Tensor) -> bool:
    """Whether a state has a value for each element."""
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _whole(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> Tensor:
    """As one; over the same memory if they follow one another there as ``like`` do."""
    is_laid_alike = all(a.stride() == b.stride() for a, b in zip(tensors, like, strict=True))
    whole = joined(tensors) if is_laid_alike else None
    return flattened(tensors, like) if whole is None else whole


def _is_alike(found: Tensor, plain: Tensor) -> bool:
    if torch.equal(found, plain):
        return True
    rounding = TOLERANCE * torch.finfo(plain.dtype).eps
    largest = float(plain.detach().abs().nan_to_num(posinf=0).max())
    return torch.allclose(found, plain, rounding, rounding * largest, equal_nan=True)

"""The step of an optimizer that steps many small parameters as a few long ones."""

from __future__ import annotations

import logging
import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from bagua_training.optimizers.contiguity import (
    LongParameter,
    calculate_mutual_groups,
    flattened,
    is_joinable,
    joined,
    kind,
    parts_of,
    share_memory,
    views,
)
from bagua_training.optimizers.reading import Reading, read
from bagua_training.optimizers.trial import Closure, copy_of, difference, settings_of, step_plainly

logger = logging.getLogger(__name__)

TRIED_STEPS = frozenset((1, 2, 10, 100))
"""Steps that are tried: states are made in the first; a later one may show what is done now and
then.
"""
MOST_ELEMENTS = {"cpu": 1 << 15}
"""The most elements of a long parameter. On a CPU torch computes so many in one thread, and they
fit the cache: more of them wait for threads that other processes hold up."""
MOST_ELEMENTS_ELSEWHERE = 1 << 24
"""Most elements on a GPU, which limits the memory for what a step computes."""
FEWEST_PARAMETERS = 4
"""The fewest parameters that fill a long one. A larger parameter is stepped alone: its work
outweighs the calls."""


@dataclass
class _Group:
    """How the parameters of a group are stepped, as long as nothing about them changes."""

    parameters: list[Parameter]
    longs: list[LongParameter]
    alone: list[Parameter]
    idle: list[Parameter]
    """Small parameters without a gradient."""

    def is_current(self, parameters: Sequence[Parameter], state: Any) -> bool:
        return (
            len(parameters) == len(self.parameters)
            and all(map(operator.is_, parameters, self.parameters))
            and all(parameter.grad is None for parameter in self.idle)
            and all(long.is_current(state) for long in self.longs)
        )


class FusedStep:
    """The fused step of one optimizer.

    Args:
        reading: what reading its code has shown; it is read anew where its switches change. None:
            the user knows that it treats each element by itself.

    Attributes:
        shadow: a copy of the optimizer that steps over the long parameters.
        refusal: why the optimizer is left plain; empty while it is not.
        steps: in which something was fused.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        do_flatten: bool,
        check_flatten: bool,
        reading: Reading | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.shadow = copy_of(optimizer)
        self.do_flatten = do_flatten
        self.check_flatten = check_flatten
        self.refusal = ""
        self.steps = 0
        self._reading = reading
        self._moved: set[Parameter] = set()
        self._groups: list[_Group] = []
        self._within: set[Parameter] = set()
        if do_flatten:
            self._flatten_weights()

    @torch.no_grad()
    def __call__(self, loss: Closure | None) -> int:
        """Make one step, unless it is refused.

        Args:
            loss: what the optimizer is given as its closure; computes nothing anew.

        Returns:
            In how many parameter groups something was fused.
        """
        if self._reading is not None and not self._reading.is_current(self.optimizer):
            self._reading, self._groups = read(self.optimizer), []
        if self.look() and self._reading is not None:
            reason = self._reading.reason or self._reading.foreign_state(self.optimizer)
            if reason:
                self._refuse(unread(self.optimizer, reason))
                return 0
        fused_groups = sum(1 for group in self._groups if group.longs)
        self.steps += fused_groups > 0
        if fused_groups and self.steps in TRIED_STEPS:
            reason = self._reason_to_refuse(loss)
            if reason:
                self._refuse(reason)
                return 0
        self.step(loss)
        return fused_groups

    def look(self) -> bool:
        """Find what is stepped as one, if anything has changed since; returns whether it has."""
        groups, state = self.optimizer.param_groups, self.optimizer.state
        if len(groups) == len(self._groups) and all(
            found.is_current(group["params"], state)
            for found, group in zip(self._groups, groups, strict=True)
        ):
            return False
        if self.do_flatten and self.check_flatten:
            self._flatten_weights()
        self._groups = [self._found_in(group["params"]) for group in groups]
        self._within = {
            parameter
            for group in self._groups
            for long in group.longs
            for parameter in long.parameters
        }
        return True

    def step(self, loss: Closure | None) -> None:
        """The shadow's; then what it did to states and settings is the optimizer's."""
        real, shadow = self.optimizer, self.shadow
        longs = [long for group in self._groups for long in group.longs]
        is_counted = self._reading is not None and not self._reading.uses_data
        vars(shadow).update(settings_of(real))
        shadow.state = defaultdict(dict)
        shadow.state.update({key: of for key, of in real.state.items() if key not in self._within})
        for long in longs:
            long.take_gradients(is_counted)
            if long.state:
                shadow.state[long.parameter] = long.state
        shadow.param_groups = [
            {**group, "params": [*(long.parameter for long in found.longs), *found.alone]}
            for group, found in zip(real.param_groups, self._groups, strict=True)
        ]
        try:
            step_plainly(shadow, loss)
        finally:
            self._take_back(longs)

    def _take_back(self, longs: Sequence[LongParameter]) -> None:
        """Take back what the shadow did, all of it or, if it raised, what came before."""
        real, shadow = self.optimizer, self.shadow
        for long in longs:
            long.give_back(shadow.state.pop(long.parameter, None), real.state)
        real.state.update(shadow.state)
        for group, done in zip(real.param_groups, shadow.param_groups, strict=True):
            group.update({key: value for key, value in done.items() if key != "params"})
        vars(real).update(settings_of(shadow))

    def _flatten_weights(self) -> None:
        """The small ones of a group, type and device that do not follow one another are moved."""
        for group in self.optimizer.param_groups:
            kinds: dict[Any, list[Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if is_joinable(parameter) and _is_small(parameter):
                    kinds[parameter.dtype, parameter.device].append(parameter)
            for parameters in kinds.values():
                weights = [parameter.detach() for parameter in parameters]
                if joined(weights) is None and not share_memory(weights):
                    flat = flattened(weights, weights)
                    for parameter, view in zip(parameters, views(flat, weights), strict=True):
                        parameter.data = view
                    self._moved.update(parameters)

    def _found_in(self, parameters: Sequence[Parameter]) -> _Group:
        state = self.optimizer.state
        kinds: dict[Any, list[Parameter]] = defaultdict(list)
        for parameter in filter(_is_small, parameters):
            kinds[kind(parameter, state.get(parameter, {}))].append(parameter)
        idle = [parameter for parameter in kinds.pop(None, []) if parameter.grad is None]
        longs = [
            LongParameter(run, state) for alike in kinds.values() for run in self._runs_of(alike)
        ]
        within = {parameter for long in longs for parameter in long.parameters}
        alone = [parameter for parameter in parameters if parameter not in within]
        return _Group(list(parameters), longs, alone, idle)

    def _runs_of(self, parameters: Sequence[Parameter]) -> Iterator[list[Parameter]]:
        """The runs of parameters that follow one another in memory, none of them too long."""
        lists = [[parameter.detach() for parameter in parameters]]
        if not self.do_flatten:
            lists.append([p.grad for p in parameters if p.grad is not None])
            lists += parts_of(parameters, self.optimizer.state)
        for places in calculate_mutual_groups(lists):
            run: list[Parameter] = []
            elements = 0
            for parameter in (parameters[place] for place in places):
                if elements + parameter.numel() > _most_elements(parameter):
                    yield run
                    run, elements = [], 0
                run.append(parameter)
                elements += parameter.numel()
            if len(run) > 1:
                yield run

    def _refuse(self, reason: str) -> None:
        """Make all steps plain from now on; what was moved gets memory of its own again."""
        self.refusal = reason
        logger.warning(reason)
        self._groups = []
        for parameter in self._within | self._moved:
            state = self.optimizer.state.get(parameter, {})
            for name, value in state.items():
                if parameter in self._within and isinstance(value, Tensor):
                    state[name] = value.clone()
            if parameter in self._moved:
                parameter.data = parameter.data.clone()

    def _reason_to_refuse(self, loss: Closure | None) -> str:
        reason = difference(
            self.optimizer,
            [[p for long in group.longs for p in long.parameters] for group in self._groups],
            _step_once,
            loss,
        )
        name = type(self.optimizer).__name__
        return reason and (
            f"{name} is not fused: in step {self.steps} {reason}. All its steps remain plain."
        )


def unread(optimizer: Optimizer, reason: str) -> str:
    """The sentence that says why an optimizer is left plain because of its code."""
    return (
        f"{type(optimizer).__name__} is not fused: its code is not seen to treat each element by "
        f"itself, as {reason}. All its steps remain plain. If you know that it does, say so: "
        "fuse_optimizer(..., element_wise=True)"
    )


def _step_once(optimizer: Optimizer, loss: Closure | None) -> None:
    """A fused step that nobody has looked at."""
    fused = FusedStep(optimizer, do_flatten=True, check_flatten=False)
    fused.look()
    fused.step(loss)


def _most_elements(parameter: Parameter) -> int:
    return MOST_ELEMENTS.get(parameter.device.type, MOST_ELEMENTS_ELSEWHERE)


def _is_small(parameter: Parameter) -> bool:
    return parameter.numel() * FEWEST_PARAMETERS <= _most_elements(parameter)

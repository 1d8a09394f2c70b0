"""The units of a sharded model, whose settings are changed between two steps.

Each of its forward and backward passes gathers and reduces, so all ranks make them together. A
change is made where all ranks begin a forward pass of the whole model for training, when every
unit is idle.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from bagua_client.algorithms import DEFAULT_ALGORITHM, Algorithm, find
from bagua_client.algorithms.base import Declared
from bagua_client.configuration import Configuration
from bagua_client.layout import Layout, plan
from bagua_client.sharded.memory import UnitsMemory
from bagua_client.sharded.offer import (
    NOT_SEEN,
    WHOLE,
    ShardedOffer,
    default_of,
    refusal_of,
    specs_of,
)
from bagua_client.sharded.settings import STEPS_IN_BACKWARD, MicroBatches, UnitSettings, parts_of
from bagua_client.sharded.traffic import ShardCommunicator, Traffic, uses_ours
from bagua_client.torch_private.merged_units import why_not
from bagua_client.torch_private.optimizer import (
    at_each_step,
    before_each_unscaling,
    step_is_compiled,
)
from bagua_client.torch_private.reducer import is_in_backward
from bagua_client.torch_private.sharded import Unit, after_reductions
from bagua_client.torch_private.wrapper import untraced
from bagua_client.tunable.looks import Observers
from bagua_client.tunable.passes import Passes
from bagua_client.tunable.tunable import STEPS_SEEN, Timeline, Tunable

# What is seen of a sharded model's steps on one rank; all of it is called by way of the
# observers.


class UnitObservation:
    """What is seen of one model's steps.

    Attributes:
        parts: for the first of several units that communicate as one, the places of all.
        last: the unit whose gradients are taken to come last in a step; None: it is not known.
    """

    def __init__(self, observers: Observers) -> None:
        self.parts: Mapping[int, tuple[int, ...]] = {}
        self._observers = observers
        self._timeline: Timeline | None = None
        self._seen: list[int] = []
        self.last: int | None = None

    def record(self, timeline: Timeline | None) -> None:
        """Record the next steps in ``timeline``; None: stop recording."""
        self._timeline = timeline

    def scatter_begins(self, unit: int, size_bytes: int) -> Callable[[], None] | None:
        """The gradients of a unit are ready on this rank. Returns what to call when they are
        reduced, if anything.

        Args:
            size_bytes: 0: nobody will tell when, so that nothing is recorded.
        """
        self._seen.append(unit)
        on_end = None
        if self._timeline is not None and size_bytes:
            for place in self.parts.get(unit, (unit,)):
                self._timeline.tensor_ready(place)
            on_end = partial(self._observers.call, self._timeline.bucket_starts(size_bytes))
        return on_end

    def gather_begins(self, unit: int, size_bytes: int) -> Callable[[], None] | None:
        """A unit is about to be gathered. Returns what to call when it is there, if anything."""
        if self._timeline is None:
            return None
        return partial(self._observers.call, self._timeline.gather_starts(unit, size_bytes))

    def backward_ends(self) -> None:
        """The next step's last unit is taken to be this one's."""
        self.last = self._seen[-1] if self._seen else None
        self._seen.clear()


logger = logging.getLogger(__name__)

HELD = "_bagua_held"
"""The attribute of a model that holds what refers to its modules."""
OUT_OF_ORDER = "the model does not use each of them once, in the order in which it lists them"
COMPILED_STEP = (
    "the optimizer's step is compiled, and would be anew for each size, as gradients lie elsewhere"
)


@dataclass(eq=False)
class _Held:
    """What refers to a model's modules, and is held by the model alone: whoever is told of its end
    holds its tunable until then."""

    units: Sequence[Unit]
    memory: UnitsMemory | None
    traffic: Traffic
    settings: UnitSettings


class TunableUnits(Tunable):
    """The units of one model. All ranks must make theirs together; see :class:`Tunable`.

    Args:
        model: whose forward pass begins a step.
        units: of the model, in the order in which it lists them.
        algorithm: that it trains with, where no configuration names another.
        communicator: of the ranks that train it.

    Raises:
        ValueError: the algorithm is not for such a model, or does not work for it.
    """

    cannot, failed = "cannot set its units", "setting the units failed"
    communicator: ShardCommunicator

    def __init__(
        self,
        model: torch.nn.Module,
        units: Sequence[Unit],
        algorithm: Algorithm,
        communicator: ShardCommunicator,
    ) -> None:
        if units[0].is_whole and not algorithm.is_torchs:
            raise ValueError(f"{algorithm.name} is for parts of a model, and {WHOLE}")
        super().__init__(communicator, model, units[0].device)
        self.observation = UnitObservation(self.observers)
        self.micro_batches = MicroBatches()
        self.parameters = [each for unit in units for each in unit.parameters]
        self._own = frozenset(map(id, self.parameters))
        self.tensors = specs_of(units)
        # Gradients become ready from the model's end on.
        self.order = tuple(reversed(range(len(units))))
        self.declared = Declared(algorithm, "sharded", self.parameters, communicator)
        self.algorithm = self.declared.new(Configuration())
        self.default = default_of(units)
        if algorithm.hierarchical and communicator.has_nodes:
            self.default = replace(self.default, hierarchical="shards")
        self.default = self.recomputation.named(self.default)
        communicator.prepare(self.default)
        self.layout = plan(self.tensors, self.order, self.default)
        self._is_open = self._is_attached = self._is_in_forward = False
        self._unmergeable, self._has_compiled_step = why_not(units) or NOT_SEEN, False
        self._used: list[int] = []
        for place, unit in enumerate(units if self._unmergeable == NOT_SEEN else ()):
            unit.when_used(partial(self._used.append, place))
        traffic = Traffic(
            units,
            communicator,
            self.algorithm,
            self.default,
            self._gather_begins,
            self._scatter_begins,
            lambda: self.listener.waiting(),
        )
        memory = None
        if self.device_memory is not None:
            memory = UnitsMemory(
                *(units, self.device_memory, self.layout, self.declared.new),
                *(communicator.ranks_beside, self.recomputation),
            )
        settings = UnitSettings(units, traffic, communicator, self.micro_batches)
        held = _Held(units, memory, traffic, settings)
        vars(model)[HELD] = held
        self._held_by_model, self._passes = weakref.ref(held), Passes()
        self._follow()
        self._handles = [
            model.register_forward_pre_hook(self._forward_begins, prepend=True),
            model.register_forward_hook(self._forward_ends, always_call=True),
            at_each_step(self.weights_will_change, is_before=True),
            before_each_unscaling(self.weights_will_change),
            at_each_step(self.weights_change),
            *(
                module.register_forward_hook(self._unit_ends)
                for unit in units
                for module in unit.modules
                if module is not model
            ),
        ]
        weakref.finalize(model, self.forget).atexit = False

    @property
    def _held(self) -> _Held:
        held = self._held_by_model()
        if held is None:
            raise ReferenceError("the model is gone")
        return held

    @property
    def units(self) -> Sequence[Unit]:
        return self._held.units

    @property
    def memory(self) -> UnitsMemory | None:  # type: ignore[override]
        return self._held.memory

    def forget(self) -> None:
        """See :meth:`Tunable.forget`; nor are parameters and gradients held any longer."""
        super().forget()
        if (held := self._held_by_model()) is not None:
            held.traffic.remove()
            for unit in held.units:
                unit.when_used(None)
        self.parameters = self.declared.parameters = ()
        self.algorithm = find(DEFAULT_ALGORITHM)

    # Plan

    @property
    def order_is_agreed(self) -> bool:
        """See :meth:`Tunable.order_is_agreed`; and what there is to know of micro-batches is."""
        return super().order_is_agreed and self.micro_batches.is_known

    @property
    def offer(self) -> ShardedOffer:
        return ShardedOffer(
            default=self.default,
            communicator=self.communicator,
            algorithms=self.declared.choices,
            units=self.units,
            tensors=self.tensors,
            unmergeable=self._unmergeable,
            micro_batches=self.micro_batches,
            recomputed=self.recomputed,
        )

    @property
    def refusal(self) -> str:
        return refusal_of(self.units)

    def plan(self, configuration: Configuration) -> Layout:
        configuration = self.declared.named(self.recomputation.named(configuration))
        self._planned(configuration)
        return super().plan(configuration)

    def _planned(self, configuration: Configuration) -> Algorithm:
        """The algorithm that a configuration names: the one in force, or a new one.

        Raises:
            ValueError: there is none for this model.
        """
        is_in_force = configuration.algorithm == self.layout.configuration.algorithm
        return self.algorithm if is_in_force else self.declared.new(configuration)

    # Apply

    def _put(self, layout: Layout) -> None:
        algorithm = self._planned(layout.configuration)
        is_open = self._passes.open > 0 or self.observers.has_failed  # Then it is not known.
        self._held.settings.put(layout, algorithm, is_open)
        self.recomputation.put(layout.configuration.recomputed_blocks)

    def _described(self, layout: Layout) -> str:
        return f"{len(self.units)} units communicate by {layout.configuration}, set"

    def _follow(self) -> None:
        """Let our objects communicate only where they are needed."""
        self.algorithm = self._held.traffic.algorithm
        self.observation.parts = {part[0]: part for part in parts_of(self.layout)}
        found = self.layout.configuration
        is_seen = self._steps >= STEPS_SEEN and self.micro_batches.is_known
        is_watched = self._is_attached or not is_seen
        is_torchs = self.algorithm.is_torchs and not found.changes_numbers
        if is_watched or uses_ours(found) or not is_torchs:
            self._held.traffic.install()
        else:
            self._held.traffic.remove()

    # Measure

    def attach(self, in_detail: bool = True) -> None:
        self._is_attached = True
        self._follow()

    def record(self, timeline: Timeline | None) -> None:
        self.observation.record(timeline)

    def detach(self) -> None:
        super().detach()
        self.record(None)
        self._is_attached = False
        if self._next is None and not self.is_left:
            self._follow()

    def _gather_begins(self, unit: int, size_bytes: int) -> Callable[[], None] | None:
        self._look_at_memory(unit, is_gathered=True)
        return self.observers.call(self.observation.gather_begins, unit, size_bytes)

    def _scatter_begins(self, unit: int, size_bytes: int) -> Callable[[], None] | None:
        """Called in the backward pass, for each unit in the same order on all ranks."""
        if not self._is_open and self.units[unit].sums_wholly:
            self._is_open = True
            if (model := self._model()) is not None:
                after_reductions(model, self._reduced)
        self._look_at_memory(unit, is_gathered=False)
        on_end = self.observers.call(self.observation.scatter_begins, unit, size_bytes)
        # On a GPU nothing tells how long it waits for what is gathered beside its computing.
        if unit == self.observation.last and self.communicator.device.type == "cpu":
            self.observers.call(self.listener.computed)
        return on_end

    def _look_at_memory(self, unit: int, is_gathered: bool) -> None:
        """What is there under the default where a unit travels, which costs a little time."""
        if self._steps < STEPS_SEEN and self.memory is not None:
            self.observers.call(self.memory.travels, unit, is_gathered)

    def _reduced(self) -> None:
        """The backward pass is over, and torch has waited for all that was reduced."""
        if not self._is_open:  # It was told so twice, after an error in a backward pass.
            return
        self._is_open = False
        self.observers.call(self.micro_batches.reduced, self.units)
        self.observers.call(self.observation.backward_ends)
        self._count_step()
        if self._steps == STEPS_SEEN:
            self._follow()
        self.listener.reduced()

    def weights_will_change(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer steps, which needs gradients and memory."""
        if self._let_go(optimizer) and self._held.settings.reduce_late():
            self._reduced()

    def _let_go(self, optimizer: torch.optim.Optimizer) -> bool:
        """Let go of what is gathered if an optimizer of this model's steps; whether it is one.
        Where it steps inside a pass, as some do in the backward pass for one parameter after the
        other, units may be in use; the next pass begins anew anyway."""
        if self._is_in_forward or is_in_backward() or self.is_left:
            return False
        if is_own := self._is_own(optimizer):
            self._held.settings.reshard()
        return is_own

    def weights_change(self, optimizer: torch.optim.Optimizer) -> None:
        """It has stepped."""
        was_known = self.is_left or self.micro_batches.is_known
        if self._let_go(optimizer):
            self._has_compiled_step |= step_is_compiled(optimizer)
            self.micro_batches.step_ends()
        elif is_in_backward() and not was_known and self._is_own(optimizer):
            self.micro_batches.rule_out(STEPS_IN_BACKWARD)
        if not was_known and self.micro_batches.is_known:
            self._follow()

    def _is_own(self, optimizer: torch.optim.Optimizer) -> bool:
        """Also where that cannot be known."""
        return self.observers.call(self._holds_own, optimizer) is not False

    def _holds_own(self, optimizer: torch.optim.Optimizer) -> bool:
        held = (each for group in optimizer.param_groups for each in group["params"])
        return any(id(each) in self._own for each in held)

    @untraced
    def _forward_begins(self, *_: Any) -> None:
        settings, is_training = self._held.settings, torch.is_grad_enabled()
        self._used.clear()
        if not is_in_backward():  # The last backward pass may have ended with an error.
            self._is_open = False
        if self._next is not None and is_training:
            self._carry_out()
        settings.pass_begins(is_training and not is_in_backward())
        self._is_in_forward, settings.is_training = True, is_training

    @untraced
    def _forward_ends(self, _: torch.nn.Module, __: Any, output: Any) -> None:
        self._is_in_forward = self._held.settings.is_training = False
        self.observers.call(self._passes.forward_ends, output)
        is_whole = output is not None  # An error may have ended it.
        if self._unmergeable == NOT_SEEN and self._steps and is_whole:
            self.observers.call(self._see_order)
        if not torch.is_grad_enabled():
            self._held.settings.reshard()

    def _see_order(self) -> None:
        """What is used twice in a pass, or in another order, cannot communicate as one."""
        named = [(place, unit) for place, unit in enumerate(self.units) if unit.name]
        inner = [place for place, unit in named if unit.travels]
        in_order = [place for place in self._used if place in {*inner}] == inner
        for unit in self.units:
            unit.when_used(None)
        compiled = COMPILED_STEP if self._has_compiled_step else ""
        self._unmergeable = compiled if in_order else OUT_OF_ORDER
        if self._unmergeable and self._is_attached and self.communicator.rank == 0:
            logger.info("autotune merges no units: %s", self._unmergeable)

    @untraced
    def _unit_ends(self, _: torch.nn.Module, __: Any, output: Any) -> None:
        if not self._is_in_forward and not is_in_backward():
            # Of a block that the training calls by itself.
            self.observers.call(self._passes.forward_ends, output)

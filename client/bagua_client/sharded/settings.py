"""Puts a configuration in force on the units of a sharded model, between two steps; and the
micro-batches of a step, over which what is gathered may stay."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median_low
from typing import Any

import torch

from bagua_client.algorithms import Algorithm
from bagua_client.layout import Layout
from bagua_client.sharded.memory import kept_units
from bagua_client.sharded.traffic import ShardCommunicator, Traffic
from bagua_client.torch_private.merged_units import MergedUnits
from bagua_client.torch_private.sharded import Unit, checksums
from bagua_client.tunable.looks import seen

logger = logging.getLogger(__name__)

STEPS_REMEMBERED = 5
STEPS_LOOKED_AT = 2
"""So many steps of several micro-batches must have shown that no weight changes unseen."""
MOST_PASSES_AWAITED = 32
"""So many passes a step of an optimizer is waited for."""
NO_OPTIMIZER = "no step of an optimizer of torch's was seen"
NOT_SEEN = "the weights are of a kind that cannot be looked at"
STEPS_IN_BACKWARD = "an optimizer steps in the backward pass"
NOT_TOLD = (
    "the training does not tell which micro-batch is the last (model.report_last_micro_batch, or "
    "torch's set_is_last_backward)"
)
ENDED_BY_HAND = "the training itself ends each backward pass (set_manual_backward_finalization)"
REDUCED_ONCE = "the training itself reduces them in one micro-batch of each step"
GRADIENTS_USED = "the training writes to gradients between two micro-batches"
WRITTEN_UNSEEN = "the training writes to weights' data between two micro-batches, which nobody sees"
"""Why nothing may be kept over micro-batches, or left to the last."""


class MicroBatches:
    """How many passes a step of the optimizer has, and which of them use what an earlier one has
    gathered.

    A gathering is a communication, so all ranks must come to the same answers. They make the same
    passes; so what counts is the number of them, and where the optimizer steps, or weights are
    written, earlier than that.

    Attributes:
        is_known: whether ``usual`` and ``obstacle`` have been found out.
        obstacle: why nothing may be kept over them; empty: it may, or that is not known yet.
        undeferrable: why nothing may be left to the last one; the same.
        told_last: whether the training says that the next is the last.
        is_deferring: whether reductions are left to the last one now.
    """

    is_known, obstacle, undeferrable = False, "", ""
    told_last, is_deferring = True, False

    def __init__(self) -> None:
        self._looked_at = 0
        self._first: tuple[Any, torch.Tensor] | None = None
        self._unseen: list[torch.Tensor] = []
        self._told: list[bool] = []
        self._gradients: torch.Tensor | None = None
        self._used: list[torch.Tensor] = []
        self._counts: deque[int] = deque(maxlen=STEPS_REMEMBERED)
        self._since_step = self._since_gathered = 0
        self._versions: Any = None
        self._stays = False

    @property
    def usual(self) -> int:
        """Of the last steps; 0: there was none. A step that one rank leaves out, as for a loss that
        is not finite, changes nothing."""
        return median_low(self._counts) if self._counts else 0

    def pass_begins(self, units: Sequence[Unit]) -> None:
        """A forward pass that a backward pass may follow."""
        self._since_step += 1
        if self.is_known:
            return
        if not self._counts and self._since_step >= MOST_PASSES_AWAITED:
            self.rule_out(NO_OPTIMIZER)
        elif self.usual > 1 and not seen(lambda: self._look(units), False):
            self.rule_out(NOT_SEEN)

    def rule_out(self, reason: str) -> None:
        """Nothing may be kept or deferred, for this reason."""
        self.is_known, self.obstacle, self.undeferrable = True, reason, reason

    def _look(self, units: Sequence[Unit]) -> bool:
        """Remember whether weights have changed that seem not to have; always True."""
        versions, found = [unit.versions for unit in units], _sums(unit.parts for unit in units)
        if self._gradients is not None:
            now = _sums(unit.gradients for unit in units)
            is_same = now.shape == self._gradients.shape
            self._used.append((now != self._gradients).any() if is_same else torch.tensor(True))
        if self._since_step == 1 or self._first is None or self._first[0] != versions:
            self._first = versions, found
        else:
            self._unseen.append((found != self._first[1]).any())
        return True

    def reduced(self, units: Sequence[Unit]) -> None:
        """A backward pass has reduced its gradients."""
        if not self.is_known:
            self._told.append(self.is_last(units))
            if units[0].is_ended_by_hand:
                self.undeferrable = self.undeferrable or ENDED_BY_HAND
            self._gradients = _sums(unit.gradients for unit in units)

    def is_last(self, units: Sequence[Unit]) -> bool:
        """Whether the training says that the pass under way is the step's last."""
        return self.told_last and units[0].is_last_backward

    def step_ends(self) -> None:
        """An optimizer of the model's has stepped."""
        count, self._since_step = self._since_step, 0
        if count:
            self._counts.append(count)
        told, self._told, self._gradients = self._told, [], None
        if self.is_known:
            return
        if self._first is not None:
            self._looked_at += 1
            is_told = len(told) > 1 and told == [False] * (len(told) - 1) + [True]
            if count > 1 and not (is_told or self.is_deferring):
                reason = REDUCED_ONCE if len(told) == 1 else NOT_TOLD
                self.undeferrable = self.undeferrable or reason
        if self.usual == 1 or self._looked_at >= STEPS_LOOKED_AT:
            self.is_known = True
            self.obstacle = WRITTEN_UNSEEN if any(map(bool, self._unseen)) else ""
            if any(map(bool, self._used)):
                self.undeferrable = self.undeferrable or GRADIENTS_USED
            self._first, self._unseen, self._used = None, [], []

    def goes_on(self, versions: Any) -> bool:
        """Whether the pass that begins may use what was gathered, if these are the weights'
        versions."""
        stays, self._stays = self._stays, False
        if not stays or versions != self._versions:
            return False
        self._since_gathered += 1
        return True

    def begin(self, versions: Any) -> None:
        """The pass that begins gathers weights of these versions."""
        self._versions, self._since_gathered = versions, 1

    def stays(self, is_reduced: bool) -> bool:
        """Whether the pass under way leaves what is gathered for the next one.

        Args:
            is_reduced: whether the gradients are; a training that accumulates them tells by this
                which pass is the last.
        """
        self._stays = not is_reduced or self._since_gathered < self.usual
        return self._stays

    def let_go(self) -> None:
        """Nothing is gathered any more."""
        self._stays = False


def _sums(tensors: Iterable[Sequence[torch.Tensor]]) -> torch.Tensor:
    return checksums([tensor for each in tensors for tensor in each])


Parts = list[tuple[int, ...]]


def parts_of(layout: Layout) -> Parts:
    """The places of the units that communicate as one, in the order of the model."""
    return sorted(tuple(sorted(bucket)) for bucket in layout.partition)


class UnitSettings:
    """What is set on the units of one model.

    Args:
        units: of the model, in the order in which it lists them.
        traffic, communicator: between its ranks.
        micro_batches: of a step.

    Attributes:
        is_training: whether a forward pass of the model is under way that a backward pass may
            follow.
    """

    is_training = False

    def __init__(
        self,
        units: Sequence[Unit],
        traffic: Traffic,
        communicator: ShardCommunicator,
        micro_batches: MicroBatches,
    ) -> None:
        self._units = units
        self._traffic, self._communicator = traffic, communicator
        self._merged = MergedUnits(units)
        self.micro_batches = micro_batches
        self._kept: list[Unit] = []
        self._is_ahead = self._keeps_on = False
        self._deferred, self._has_warned = "off", False
        self._are_unreduced = False  # Gradients, while a layout is put: also if that fails.
        self._given_buffers = units[0].scatter_buffers

    def put(self, layout: Layout, algorithm: Algorithm, has_open_pass: bool = False) -> None:
        """Put a layout and its configuration in force; only where no unit is in a pass.

        Args:
            algorithm: that the configuration names.
            has_open_pass: whether a backward pass may come for an earlier forward pass. Then no
                units are merged or parted, as it will look for those that there were.

        Raises:
            RuntimeError: a unit is in a pass, or a backward pass may come.
        """
        self.reshard()
        for unit in self._units:
            unit.drop_what_was_thrown_away()
        self._are_unreduced |= any(unit.has_unreduced for unit in self._units)
        if has_open_pass and parts_of(layout) != [part for _, part in self._merged.leading]:
            raise RuntimeError("the backward pass of an earlier forward pass is still to come")
        for unit in self._units:
            if not unit.is_idle:
                raise RuntimeError(f"the unit {unit.name or '(root)'} is in use")
        configuration, parts = layout.configuration, parts_of(layout)
        for unit in self._units:
            if unit.is_spread_narrowly:  # Torch would gather it where it is kept from now on.
                unit.reshard()
        self._merged.merge(parts)
        for unit in self._units:
            unit.leave_unreduced(False)
        asked = kept_units(self._units, configuration.kept_units)
        nodes = self._communicator.nodes(configuration)
        leading = []
        self._kept = []
        self._keeps_on = configuration.kept_over_micro_batches == "on"
        stays = self.micro_batches.stays if self._keeps_on else None
        self._deferred = configuration.deferred_reduction
        self.micro_batches.is_deferring = self._deferred != "off"
        may_wait = self.micro_batches.is_deferring or self._are_unreduced
        defers = self._left_to_the_last if may_wait else None
        for unit, part in self._merged.leading:
            leading.append(unit)
            is_kept = all(self._units[place] in asked for place in part)
            own_nodes = nodes if self._communicator.is_everywhere(part[0]) else None
            unit.keep(is_kept, own_nodes, lambda: self.is_training, stays, defers)
            unit.leave_unreduced(self._are_unreduced)
            is_spread = own_nodes is not None and unit.may_be_spread
            self._kept += [unit] * (is_kept or is_spread or unit.may_stay)
        self._are_unreduced = False
        self._gather_ahead(leading, configuration.prefetch)
        if self._units[0].has_scatter_buffers:
            self._units[0].scatter_buffers = max(configuration.scatter_buffers, self._given_buffers)
        self._traffic.configuration, self._traffic.algorithm = configuration, algorithm

    def _gather_ahead(self, leading: Sequence[Unit], depth: int) -> None:
        self._is_ahead = depth > 0
        # Torch gathers all units of a module ahead.
        leading = [each for each in leading if each.is_first_of_module]
        for place, unit in enumerate(leading):
            if depth:
                before = leading[max(place - depth, 0) : place]
                unit.prefetch((leading[place + 1 : place + 1 + depth], before[::-1]))
            else:
                unit.prefetch()

    def pass_begins(self, counts: bool) -> None:
        """A forward pass of the model begins: what is gathered of the one before is used again only
        where it was kept for that, and no weight was written since.

        Args:
            counts: whether a backward pass may follow, for the first time.
        """
        if counts:
            self.micro_batches.pass_begins(self._units)
            for unit in self._units:
                unit.drop_what_was_thrown_away()
        versions = [unit.versions for unit in self._kept] if self._keeps_on else []
        if not (self._keeps_on and counts):
            self.reshard()
        elif not self.micro_batches.goes_on(versions):
            self.reshard()
            self.micro_batches.begin(versions)
        else:
            self._let_go_ahead()

    def _left_to_the_last(self) -> str:
        if self._deferred == "off" or self.micro_batches.is_last(self._units):
            return ""
        return self._deferred

    def reduce_late(self) -> bool:
        """An optimizer steps: reduce the gradients that wait for a micro-batch of which the
        training said that it would come; whether there were some. All ranks call this together."""
        for unit in self._units:
            unit.drop_what_was_thrown_away()
        waiting = [unit for unit in reversed(self._units) if unit.has_unreduced]
        for unit in waiting:
            unit.reduce_now()
        if waiting and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "autotune: an optimizer steps although the last micro-batch of its step was not "
                "told (model.report_last_micro_batch): gradients are reduced now, and were not "
                "when the training clipped them"
            )
        return bool(waiting)

    def reshard(self) -> None:
        """Let go of what is gathered only because of the settings: its weights may change now.

        Torch lets go of a unit in the backward pass. Where none follows a forward pass (an
        evaluation), what is kept stays gathered until here, and what was gathered ahead of a unit
        that was not reached is there until here; both would be used with old weights. What the
        training itself keeps is left as it is.
        """
        self.micro_batches.let_go()
        self._let_go_ahead()
        for unit in self._kept:
            is_there = unit.is_gathered or unit.is_spread_narrowly
            if is_there and (unit.reshards_after_backward or unit.is_hidden):
                unit.reshard()

    def _let_go_ahead(self) -> None:
        """Of what the last pass was to use, and did not."""
        self._merged.settle()
        for unit in self._units if self._is_ahead else ():
            if unit.is_on_its_way:
                unit.reshard()

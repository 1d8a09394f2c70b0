"""Puts a configuration in force on the units of a sharded model, between two steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from bagua_client.algorithms import Algorithm
from bagua_client.layout import Layout
from bagua_client.sharded.memory import kept_units
from bagua_client.sharded.micro_batches import MicroBatches
from bagua_client.sharded.shard_communicator import ShardCommunicator
from bagua_client.sharded.traffic import Traffic
from bagua_client.torch_private.merged_units import MergedUnits
from bagua_client.torch_private.sharded import Unit

logger = logging.getLogger(__name__)

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
        defers = self._left_to_the_last if self.micro_batches.is_deferring else None
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
                unit.prefetch(leading[place + 1 : place + 1 + depth], before[::-1])
            else:
                unit.prefetch_as_given()

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
        return "" if self.micro_batches.is_last(self._units) else self._deferred

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

"""Puts a configuration in force on the units of a sharded model, between two steps."""

from __future__ import annotations

from collections.abc import Sequence

from bagua_client.configuration import Configuration
from bagua_client.sharded.memory import kept_units
from bagua_client.sharded.traffic import Traffic
from bagua_client.torch_private.sharded import Unit


class Settings:
    """What is set on the units of one model.

    Args:
        units: of the model, in the order in which it lists them.
        traffic: between its ranks.
    """

    def __init__(self, units: Sequence[Unit], traffic: Traffic) -> None:
        self._units = units
        self._traffic = traffic
        self._kept: list[Unit] = []
        self._is_ahead = False
        self._given_buffers = units[0].scatter_buffers

    def put(self, configuration: Configuration) -> None:
        """Put the configuration in force; only where no unit is in a pass.

        Raises:
            RuntimeError: one is.
        """
        self.reshard()
        for unit in self._units:
            if not unit.is_idle:
                raise RuntimeError(f"the unit {unit.name or '(root)'} is in use")
        self._is_ahead = configuration.prefetch > 0
        self._kept = kept_units(self._units, configuration.kept_units)
        for place, unit in enumerate(self._units):
            unit.keep(unit in self._kept)
            if depth := configuration.prefetch:
                before = self._units[max(place - depth, 0) : place]
                unit.prefetch(self._units[place + 1 : place + 1 + depth], before[::-1])
            else:
                unit.prefetch_as_given()
        if self._units[0].has_scatter_buffers:
            self._units[0].scatter_buffers = max(configuration.scatter_buffers, self._given_buffers)
        self._traffic.configuration = configuration

    def reshard(self) -> None:
        """Let go of what is gathered only because of the settings: its weights may change now.

        Torch lets go of a unit in the backward pass. Where none follows a forward pass (an
        evaluation), what is kept stays gathered until here, and what was gathered ahead of a unit
        that was not reached is there until here; both would be used with old weights. What the
        training itself keeps is left as it is.
        """
        for unit in self._units if self._is_ahead else ():
            if unit.is_on_its_way:
                unit.module.unshard()  # Waits for it.
                unit.module.reshard()
        for unit in self._kept:
            if unit.is_gathered and unit.reshards_after_backward:
                unit.module.reshard()

"""How much more of a device's memory a configuration of a sharded model needs than the default."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua_client.configuration import Configuration
from bagua_client.torch_private.sharded import Unit

LARGEST_SHARE = 0.9
"""Of the device's memory, for the predicted peak: allocators do not fill it to the last byte."""


def kept_units(units: Sequence[Unit], count: int) -> list[Unit]:
    """The units that stay gathered: the last ``count`` of those that otherwise would not."""
    eligible = [unit for unit in units if unit.given.mesh_kept is not None]
    return eligible[len(eligible) - count :] if count else []


class Memory:
    """The memory of one rank's device.

    Args:
        units: of the model, in the order in which it lists them.
        device: that it computes on.
    """

    def __init__(self, units: Sequence[Unit], device: torch.device) -> None:
        self._units = units
        self._device = device
        self._peak_bytes = 0

    def measure(self) -> None:
        """The default is in force, and has been for a step: what it took is known."""
        if self._device.type == "cuda":
            self._peak_bytes = torch.cuda.max_memory_allocated(self._device)

    def extra_bytes(self, configuration: Configuration, parts: Sequence[Sequence[int]]) -> int:
        """So much more than the default the configuration needs at its peak.

        What is kept stays gathered in its own dtype; what is gathered ahead adds the largest unit
        each; each further scatter buffer adds the largest unit's gradients. A merged unit is there
        twice, as it travels and as it is used.

        Args:
            parts: the places of the units that communicate as one.
        """
        kept = sum(
            unit.elements * unit.dtypes[0].itemsize
            for unit in kept_units(self._units, configuration.kept_units)
        )
        gathered, reduced = (
            max(sum(self._bytes(place, which) for place in part) for part in parts)
            for which in range(2)
        )
        alone = sum(
            max(self._bytes(place, which) for place in range(len(self._units)))
            for which in range(2)
        )
        merged = 2 * (gathered + reduced - alone)
        stripes = gathered + reduced if configuration.channels > 1 else 0
        ahead = max(configuration.prefetch - 1, 0) * gathered
        return kept + ahead + (configuration.scatter_buffers - 1) * reduced + stripes + merged

    def _bytes(self, place: int, which: int) -> int:
        unit = self._units[place]
        return unit.elements * unit.dtypes[which].itemsize

    def misfit(self, configuration: Configuration, parts: Sequence[Sequence[int]]) -> str:
        """Why the configuration does not fit on this rank's device; empty: it does."""
        if self._device.type != "cuda" or not self._peak_bytes:
            return ""
        limit = LARGEST_SHARE * _available_bytes(self._device)
        peak = self._peak_bytes + self.extra_bytes(configuration, parts)
        if peak <= limit:
            return ""
        return (
            f"it would take {peak / 2**30:.1f} GiB of this GPU's memory, of which "
            f"{limit / 2**30:.1f} GiB may be used"
        )


def _available_bytes(device: torch.device) -> float:
    total = torch.cuda.get_device_properties(device).total_memory
    # A training may have limited itself (since torch 2.8 that can be read).
    read = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return float(total * (read(device) if read is not None else 1.0))

"""How much of a device's memory a configuration needs, and whether it may be tried.

What a configuration takes is predicted; the rest is what was measured. It must stay within a share
of the memory. And were the part of it that is beyond all that was tried twice as large as
predicted, it would still have to fit on the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from bagua_client.configuration import Configuration
from bagua_client.layout import Layout
from bagua_client.tunable.device_memory import DeviceMemory
from bagua_client.tunable.memory import LARGEST_SHARE, Footprint, Lack

COMMUNICATOR_BYTES = 64 * 2**20
"""About what NCCL takes for a process group, beside torch's allocator."""


class MeasuredMemory(ABC):
    """The memory of one rank's device. A subclass says what a layout takes of it.

    Args:
        device: its memory.
        layout: the one in force, the default's.

    Attributes:
        share: of what there is, that may be used.
    """

    share = LARGEST_SHARE

    def __init__(self, device: DeviceMemory, layout: Layout) -> None:
        self._device = device
        self._rest_bytes = self._retries = self._groups = 0
        self._given = self._in_force = layout
        self._proven_bytes, self._is_short = self._extra_bytes(layout), False
        self.begin(layout)

    @abstractmethod
    def _extra_bytes(self, layout: Layout) -> int:
        """What a layout takes beyond the rest, which is the same under all of them."""

    def _groups_of(self, configuration: Configuration) -> int:
        """How many process groups of ours a configuration needs."""
        return 0

    def start_from(self, layout: Layout) -> None:
        """This is the default's layout; see :meth:`Tunable.start_from`."""
        self._given = layout

    def begin(self, layout: Layout) -> None:
        """A layout is about to come into force."""
        self._in_force = layout
        self._groups = max(self._groups, self._groups_of(layout.configuration))
        self._device.reset()
        self.settle()

    def settle(self) -> None:
        """Blocks of other sizes have been freed by now: memory that runs out counts from here."""
        self._retries = self._device.taken().retries

    def read(self) -> Footprint:
        """What the layout in force has taken since it came into force, of which is learned."""
        peak_bytes, retries = self._device.taken()
        limit_bytes, device_bytes = self._limits(self._groups)
        lack, extra_bytes = Lack.NONE, self._extra_bytes(self._in_force)
        has_retried = retries > self._retries
        if extra_bytes <= self._extra_bytes(self._given):
            # What needs no more than the default is not what fills the memory.
            self._is_short |= has_retried
        else:
            lack |= Lack.RETRIED if has_retried and not self._is_short else Lack.NONE
            lack |= Lack.OVER if peak_bytes > limit_bytes else Lack.NONE
        self._rest_bytes = max(self._rest_bytes, peak_bytes - extra_bytes)
        if not lack:
            self._proven_bytes = max(self._proven_bytes, extra_bytes)
        return Footprint(peak_bytes, limit_bytes, device_bytes, lack)

    def misfit(self, layout: Layout) -> Footprint | None:
        """What a layout would take if it may not be tried; None: it may."""
        self.read()  # What is in force has told nothing yet where no agent asks for it.
        extra_bytes = self._extra_bytes(layout)
        if extra_bytes <= self._extra_bytes(self._given):
            return None
        limit_bytes, device_bytes = self._limits(self._groups_of(layout.configuration))
        peak_bytes = self._rest_bytes + extra_bytes
        unproven_bytes = max(extra_bytes - self._proven_bytes, 0)
        if peak_bytes <= limit_bytes and peak_bytes + unproven_bytes <= device_bytes:
            return None
        return Footprint(peak_bytes, limit_bytes, device_bytes)

    def _limits(self, groups: int) -> tuple[int, int]:
        """What may be used beside so many process groups of ours, and what there is."""
        beside = max(groups - self._groups, 0) * COMMUNICATOR_BYTES
        reachable_bytes = max(self._device.reachable_bytes() - beside, 1)
        device_bytes = min(self._device.allowed_bytes(), reachable_bytes)
        return int(self.share * device_bytes), device_bytes

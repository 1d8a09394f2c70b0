"""How much of a device's memory the sizes of an engine need, and whether larger ones may be tried.

What a configuration holds is predicted; the rest is what was measured. It must stay within a share
of the memory. And were the part of it that is beyond all that was tried twice as large as
predicted, it would still have to fit on the device.
"""

from __future__ import annotations

from collections.abc import Callable

from bagua_client.layout import Layout
from bagua_client.sharded.device_memory import DeviceMemory
from bagua_client.tunable.memory import LARGEST_SHARE, Footprint, Lack
from bagua_client.zero.buckets import Buckets, Sizes


def held_bytes(sizes: Sizes, buckets: Buckets) -> int:
    """What is there at most of an engine's buckets, and of the parameters that it gathers ahead."""
    all_elements = sum(spec.elements for spec in buckets.tensors)
    # Stages 1 and 2 allocate all of a buffer, also where no bucket fills it.
    sent = min(sizes.bucket, all_elements)
    buffered = sent if buckets.is_sharded else sizes.bucket
    reduced = (buffered * (buckets.copies - 2) + 2 * sent) * buckets.element_bytes
    return reduced + min(sizes.prefetch, all_elements) * buckets.parameter_bytes


class BucketsMemory:
    """The memory of one rank's device; see :class:`bagua_client.tunable.memory.Memory`.

    Args:
        device: its memory.
        held_bytes: what a layout holds.
        layout: the one in force, the default's.
    """

    share = LARGEST_SHARE

    def __init__(
        self, device: DeviceMemory, held_bytes: Callable[[Layout], int], layout: Layout
    ) -> None:
        self._device, self._held = device, held_bytes
        self._rest_bytes = self._retries = 0
        self._given = self._in_force = layout
        self._proven_bytes, self._is_short = held_bytes(layout), False
        self.begin(layout)

    def start_from(self, layout: Layout) -> None:
        """This is the default's layout; see :meth:`Tunable.start_from`."""
        self._given = layout

    def begin(self, layout: Layout) -> None:
        """A layout is about to come into force."""
        self._in_force = layout
        self._device.reset()
        self.settle()

    def settle(self) -> None:
        """Blocks of other sizes have been freed by now: memory that runs out counts from here."""
        self._retries = self._device.taken().retries

    def read(self) -> Footprint:
        """What the layout in force has taken since it came into force, of which is learned."""
        peak_bytes, retries = self._device.taken()
        limit_bytes, device_bytes = self._limits()
        lack, held = Lack.NONE, self._held(self._in_force)
        has_retried = retries > self._retries
        if held <= self._held(self._given):
            # What needs no more than the default is not what fills the memory.
            self._is_short |= has_retried
        else:
            lack |= Lack.RETRIED if has_retried and not self._is_short else Lack.NONE
            lack |= Lack.OVER if peak_bytes > limit_bytes else Lack.NONE
        self._rest_bytes = max(self._rest_bytes, peak_bytes - held)
        if not lack:
            self._proven_bytes = max(self._proven_bytes, held)
        return Footprint(peak_bytes, limit_bytes, device_bytes, lack)

    def misfit(self, layout: Layout) -> Footprint | None:
        """See :meth:`Memory.misfit`."""
        self.read()  # What is in force has told nothing yet where no agent asks for it.
        held = self._held(layout)
        if held <= self._held(self._given):
            return None
        limit_bytes, device_bytes = self._limits()
        peak_bytes = self._rest_bytes + held
        unproven_bytes = max(held - self._proven_bytes, 0)
        if peak_bytes <= limit_bytes and peak_bytes + unproven_bytes <= device_bytes:
            return None
        return Footprint(peak_bytes, limit_bytes, device_bytes)

    def _limits(self) -> tuple[int, int]:
        """What may be used, and what there is."""
        reachable_bytes = max(self._device.reachable_bytes(), 1)
        device_bytes = min(self._device.allowed_bytes(), reachable_bytes)
        return int(self.share * device_bytes), device_bytes

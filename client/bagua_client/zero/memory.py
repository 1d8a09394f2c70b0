"""How much of a device's memory the sizes of an engine need."""

from __future__ import annotations

from bagua_client.layout import Layout
from bagua_client.tunable.device_memory import DeviceMemory
from bagua_client.tunable.measured_memory import MeasuredMemory
from bagua_client.zero.buckets import Buckets, Sizes
from bagua_client.zero.offer import sizes_of


def held_bytes(sizes: Sizes, buckets: Buckets) -> int:
    """What is there at most of an engine's buckets, and of the parameters that it gathers ahead."""
    all_elements = sum(spec.elements for spec in buckets.tensors)
    # Stages 1 and 2 allocate all of a buffer, also where no bucket fills it.
    sent = min(sizes.bucket, all_elements)
    buffered = sent if buckets.is_sharded else sizes.bucket
    reduced = (buffered * (buckets.copies - 2) + 2 * sent) * buckets.element_bytes
    return reduced + min(sizes.prefetch, all_elements) * buckets.parameter_bytes


class BucketsMemory(MeasuredMemory):
    """The memory of one rank's device.

    Args:
        buckets: whose sizes a layout sets.
        device, layout: see :class:`MeasuredMemory`.
    """

    def __init__(self, buckets: Buckets, device: DeviceMemory, layout: Layout) -> None:
        self._buckets, self._as_given = buckets, layout.configuration
        super().__init__(device, layout)

    def _extra_bytes(self, layout: Layout) -> int:
        sizes = sizes_of(layout.configuration, self._as_given, self._buckets)
        return held_bytes(sizes, self._buckets)

"""An engine of DeepSpeed whose sizes are changed between two steps.

A step ends where the engine's ``step`` has updated the parameters, which all ranks do together. By
then no gradient is in a bucket: there a change is made.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from bagua_client.algorithms import DEFAULT_ALGORITHM, find
from bagua_client.communication.communicator import Communicator
from bagua_client.configuration import Configuration
from bagua_client.layout import Layout, plan
from bagua_client.tunable.memory import DeviceMemory, MeasuredMemory
from bagua_client.tunable.recomputation import Recomputation
from bagua_client.tunable.switch import ChangedTogether
from bagua_client.tunable.tunable import Timeline
from bagua_client.zero.buckets import Buckets, Sizes, refusal_of
from bagua_client.zero.offer import EngineOffer, default_of, sizes_of

# How much of a device's memory the sizes of an engine need.


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
        device, layout, recomputation: see :class:`MeasuredMemory`.
    """

    def __init__(
        self,
        buckets: Buckets,
        device: DeviceMemory,
        layout: Layout,
        recomputation: Recomputation | None = None,
    ) -> None:
        self._buckets, self._as_given = buckets, layout.configuration
        super().__init__(device, layout, recomputation)

    def _extra_bytes(self, layout: Layout) -> int:
        sizes = sizes_of(layout.configuration, self._as_given, self._buckets)
        return held_bytes(sizes, self._buckets)


IN_USE = "a bucket is in use where a step ends"


class TunableEngine(ChangedTogether):
    """The sizes of one engine. All ranks must make theirs together; see :class:`Tunable`.

    Args:
        engine: of which some sizes can be changed.
        buckets: its sizes.
        communicator: of the ranks that reduce its gradients together.
    """

    cannot, failed = "cannot set its sizes", "setting the sizes failed"
    stands_back = False

    def __init__(self, engine: Any, buckets: Buckets, communicator: Communicator) -> None:
        super().__init__(communicator, engine.module, buckets.device)
        self._engine, self.buckets = weakref.ref(engine), buckets
        # The optimizer that steps is known, and holds other tensors than the model does.
        self.parameters: Sequence[torch.nn.Parameter] = ()
        self.tensors = tuple(buckets.tensors)
        self.order = tuple(range(len(self.tensors)))
        self.algorithm = find(DEFAULT_ALGORITHM)
        self._given = self.default = self.recomputation.named(default_of(buckets))
        self.layout = plan(self.tensors, self.order, self.default)
        if self.device_memory is not None:
            self.memory = BucketsMemory(
                buckets, self.device_memory, self.layout, self.recomputation
            )

    # Plan

    @property
    def offer(self) -> EngineOffer:
        """What may be changed, and why the rest may not."""
        return EngineOffer(
            default=self.default,
            communicator=self.communicator,
            algorithms=lambda allowed: [self.algorithm],
            given=self._given,
            buckets=self.buckets,
            recomputed=self.recomputed,
        )

    @property
    def refusal(self) -> str:
        return refusal_of(self._engine())

    @property
    def is_left(self) -> bool:
        return self._engine() is None

    def plan(self, configuration: Configuration) -> Layout:
        """See :meth:`Tunable.plan`. DeepSpeed closes a bucket before the gradient that would not
        fit any more; the layout's buckets, which nothing is sent by, end with it."""
        if configuration.algorithm == self.algorithm.name:
            configuration = replace(configuration, algorithm="")
        configuration = self.recomputation.named(configuration)
        self.offer.check(configuration)
        return plan(self.tensors, self.order, configuration)

    def change(self, layout: Layout) -> bool:
        """See :meth:`Tunable.change`: at once, or at the end of this step where it has begun."""
        self.schedule(layout)
        return self._carry_out() if self.buckets.are_idle else True

    def step_ends(self) -> None:
        """The engine has updated the parameters, on all ranks."""
        self._count_step()
        self.listener.reduced()
        if self._next is not None:
            self._carry_out()

    def _put(self, layout: Layout) -> None:
        if not self.buckets.are_idle:
            raise RuntimeError(IN_USE)
        self.buckets.put(sizes_of(layout.configuration, self._given, self.buckets))
        self.recomputation.put(layout.configuration.recomputed_blocks)

    def _described(self, layout: Layout) -> str:
        return f"ZeRO stage {self.buckets.stage} communicates by {layout.configuration}, set"

    # Measure

    def attach(self, in_detail: bool = True) -> None:
        """The ends of steps are seen anyway."""

    def record(self, timeline: Timeline | None) -> None:
        """The timeline stays empty, so nothing is learned from it."""

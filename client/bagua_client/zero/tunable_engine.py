"""An engine of DeepSpeed whose sizes are changed between two steps.

A step ends where the engine's ``step`` has updated the parameters, which all ranks do together. By
then no gradient is in a bucket. There a change is made, and the ranks vote on its outcome: if it
failed on one of them, all go back to what they had.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bagua_client.algorithms import find
from bagua_client.communication.agreement import attempt
from bagua_client.communication.communicator import Communicator
from bagua_client.configuration import Configuration
from bagua_client.layout import Layout, plan
from bagua_client.sharded.device_memory import memory_of
from bagua_client.tunable.observers import Observers
from bagua_client.tunable.timeline import Timeline
from bagua_client.zero.buckets import Buckets, refusal_of
from bagua_client.zero.memory import BucketsMemory, held_bytes
from bagua_client.zero.offer import Offer, default_of, sizes_of

logger = logging.getLogger(__name__)

ALGORITHM = "gradient_allreduce"
STEPS_SEEN = 3
"""The default's memory is known after so many. Stage 3 gathers ahead from the second or third on,
once it knows the order in which the model uses its modules."""
SETTLED_AFTER = 2
"""So many steps after a change, what memory is kept for later fits what is in force."""
IN_USE = "a bucket is in use where a step ends"


class Observation:
    """Nothing is seen of an engine's steps but their ends."""

    def __init__(self) -> None:
        self.on_last_ready: Callable[[], None] | None = None

    def record(self, timeline: Timeline | None) -> None:
        """The timeline stays empty, so nothing is learned from it."""


class TunableEngine:
    """The sizes of one engine. All ranks must make theirs together; see :class:`Tunable`.

    Args:
        engine: of which some sizes can be changed.
        buckets: its sizes.
        communicator: of the ranks that reduce its gradients together.
    """

    def __init__(self, engine: Any, buckets: Buckets, communicator: Communicator) -> None:
        self._engine = weakref.ref(engine)
        self.buckets, self.communicator = buckets, communicator
        self.observers = Observers(communicator.rank)
        self.observation = Observation()
        # The optimizer that steps is known, and holds other tensors than the model does.
        self.parameters: Sequence[torch.nn.Parameter] = ()
        self.tensors = tuple(buckets.tensors)
        self.order = tuple(range(len(self.tensors)))
        self.algorithm = find(ALGORITHM)
        self._given = self.default = default_of(buckets)
        self.layout = plan(self.tensors, self.order, self.default)
        self.after_reduction: Callable[[], None] | None = None
        self.on_return: Callable[[str], None] | None = None
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        self.recut_seconds = 0.0
        self._voters = communicator.group, communicator.device
        self._next: Layout | None = None
        self._steps = self._steps_in_force = 0
        device_memory = memory_of(buckets.device)
        self.memory: BucketsMemory | None = None
        if device_memory is not None:
            self.memory = BucketsMemory(device_memory, self._held_bytes, self.layout)

    def _held_bytes(self, layout: Layout) -> int:
        return held_bytes(sizes_of(layout.configuration, self._given, self.buckets), self.buckets)

    # Plan

    @property
    def offer(self) -> Offer:
        """What may be changed, and why the rest may not."""
        return Offer(self.default, self._given, self.buckets, lambda allowed: [self.algorithm])

    @property
    def order_is_agreed(self) -> bool:
        """All ranks reduce in one order, else they would wait for ever."""
        return self._steps >= STEPS_SEEN

    @property
    def refusal(self) -> str:
        return refusal_of(self._engine())

    @property
    def is_left(self) -> bool:
        return self._engine() is None

    stands_back = False

    def plan(self, configuration: Configuration) -> Layout:
        """See :meth:`Tunable.plan`. DeepSpeed closes a bucket before the gradient that would not
        fit any more; the layout's buckets, which nothing is sent by, end with it."""
        if configuration.algorithm == self.algorithm.name:
            configuration = replace(configuration, algorithm="")
        self.offer.check(configuration)
        return plan(self.tensors, self.order, configuration)

    def start_from(self, default: Configuration) -> None:
        """See :meth:`Tunable.start_from`."""
        layout = self.plan(default)
        self.prepare(layout)
        self.default = default
        if self.memory is not None:
            self.memory.start_from(layout)
        self.change(layout)

    # Vote

    def vote_in(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """See :meth:`Tunable.vote_in`."""
        self._voters = group, device

    # Apply

    def prepare(self, layout: Layout) -> None:
        """See :meth:`Tunable.prepare`: the engine's own groups carry all."""
        self.communicator.prepare(layout.configuration)

    def schedule(self, layout: Layout) -> None:
        """Put ``layout`` in force at the end of this step."""
        self.prepare(layout)
        self._next = layout

    def change(self, layout: Layout) -> bool:
        """Put ``layout``, which all ranks have agreed on, in force: at once, or at the end of this
        step where it has begun. Returns whether that worked or is still to come."""
        self.schedule(layout)
        return self._carry_out() if self.buckets.are_idle else True

    @property
    def layout_to_come(self) -> Layout:
        return self._next or self.layout

    @property
    def is_recut_due(self) -> bool:
        return self._next is not None

    @property
    def is_settled(self) -> bool:
        return self._next is None

    def step_ends(self) -> None:
        """The engine has updated the parameters, on all ranks."""
        self._steps += 1
        self._steps_in_force += 1
        if self.memory is not None:
            if self._steps_in_force == SETTLED_AFTER:
                self.observers.call(self.memory.settle)
            if self._steps == STEPS_SEEN:
                self.observers.call(self.memory.read)
        if self.after_reduction is not None:
            self.after_reduction()
        if self._next is not None:
            self._carry_out()

    def _carry_out(self) -> bool:
        assert self._next is not None
        began = time.perf_counter()
        layout, self._next = self._next, None
        self._measure_memory(layout)
        ranks, error = attempt(partial(self._put, layout), *self._voters)
        if ranks:
            self._go_back(ranks, error)
            return False
        is_new, self.layout = layout.digest != self.layout.digest, layout
        self.recut_seconds = time.perf_counter() - began
        if self.communicator.rank == 0 and is_new:
            logger.info(
                "autotune: ZeRO stage %d communicates by %s, set in %.1f ms",
                *(self.buckets.stage, layout.configuration, self.recut_seconds * 1e3),
            )
        return True

    def _put(self, layout: Layout) -> None:
        if not self.buckets.are_idle:
            raise RuntimeError(IN_USE)
        self.buckets.put(sizes_of(layout.configuration, self._given, self.buckets))

    def _go_back(self, ranks: str, error: str) -> None:
        if error:
            logger.error("rank %d cannot set its sizes (%s)", self.communicator.rank, error)
        self.observers.call(self._put, self.layout)
        self._measure_memory(self.layout)
        reason = f"setting the sizes failed on rank {ranks}"
        if self.communicator.rank == 0:
            logger.error("%s: all ranks went back to %s", reason, self.layout.configuration)
        if self.on_return is not None:
            self.observers.call(self.on_return, reason)

    def _measure_memory(self, layout: Layout) -> None:
        """Measure what a layout takes, from now on."""
        self._steps_in_force = 0
        if self.memory is not None:
            self.observers.call(self.memory.begin, layout)

    # Measure

    def attach(self) -> None:
        """The ends of steps are seen anyway."""

    def watch(self) -> None:
        """The ends of steps are seen anyway."""

    def detach(self) -> None:
        """See :meth:`Tunable.detach`."""
        self.after_reduction = self.on_return = None
        self.waiting = nullcontext
        self.observation.on_last_ready = None
        self._voters = self.communicator.group, self.communicator.device

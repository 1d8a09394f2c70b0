"""The switch to another configuration between two steps: when it takes hold, on all ranks or none.

A layout that all ranks have agreed on is scheduled. Where all of them are known to be together, and
nothing is on its way, they carry it out and vote on the outcome: if it failed on one of them, as
for want of memory, all go back to what they had.
"""

from __future__ import annotations

import logging
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from bagua_client.communication.agreement import Group, attempt
from bagua_client.communication.communicator import Communicator
from bagua_client.configuration import Configuration
from bagua_client.layout import Layout
from bagua_client.torch_private.reducer import is_in_backward
from bagua_client.torch_private.wrapper import Unsaved
from bagua_client.tunable.looks import Observers
from bagua_client.tunable.memory import MeasuredMemory, memory_of
from bagua_client.tunable.offer import Limit
from bagua_client.tunable.passes import elements_in, is_of_training
from bagua_client.tunable.recomputation import Recomputation
from bagua_client.tunable.tunable import NOBODY, Listener

logger = logging.getLogger(__name__)

STEPS_SEEN = 3
"""The default's memory is known after so many, and the order in which a model is used: what gathers
parameters ahead does so from the second or third on, once it knows it."""
SETTLED_AFTER = 2
"""So many steps after a change, what memory is kept for later fits what is in force."""


class ChangedTogether(ABC):
    """What the kinds of :class:`Tunable` have in common; what is public is described there.

    Args:
        communicator: of the ranks that train together.
        model: that they train.
        device: of this rank, on which it is.

    Attributes:
        device_memory: the device's; None: nothing is known of it.
        recomputation: of the model's blocks.
        cannot: what a rank says that could not make a change.
        failed: what all say of it.
    """

    cannot: str
    failed: str
    layout: Layout
    default: Configuration
    memory: MeasuredMemory | None = None

    def __init__(
        self, communicator: Communicator, model: torch.nn.Module, device: torch.device
    ) -> None:
        self.communicator = communicator
        self.observers = Observers(communicator.rank)
        self.device_memory = memory_of(device)
        look = None if self.device_memory is None else self.device_memory.now_bytes
        self.recomputation = Recomputation(model, self.observers, look, self._fits)
        self.listener: Listener = NOBODY
        self._model = weakref.ref(model)
        self._sees_inputs: RemovableHandle | None = None
        self.recut_seconds = 0.0
        self.vote_in(communicator.group, communicator.device)
        self._next: Layout | None = None
        self._steps = self._steps_in_force = 0
        communicator.when_destroyed(self.leave)

    @property
    def order_is_agreed(self) -> bool:
        """All ranks communicate in one order, else they would wait for ever."""
        return self._steps >= STEPS_SEEN

    @abstractmethod
    def plan(self, configuration: Configuration) -> Layout:
        """See :meth:`Tunable.plan`."""

    def start_from(self, default: Configuration) -> None:
        """See :meth:`Tunable.start_from`."""
        layout = self.plan(default)
        self.prepare(layout)
        self.default = default
        if self.memory is not None:
            self.memory.start_from(layout)
        self.change(layout)

    def vote_in(self, group: Group, device: torch.device) -> None:
        """See :meth:`Tunable.vote_in`."""
        self._voters = group, device

    def prepare(self, layout: Layout) -> None:
        """See :meth:`Tunable.prepare`."""
        self.communicator.prepare(layout.configuration)

    def schedule(self, layout: Layout) -> None:
        """See :meth:`Tunable.schedule`."""
        self.prepare(layout)
        self._next = layout

    def change(self, layout: Layout) -> bool:
        """See :meth:`Tunable.change`."""
        self.schedule(layout)
        return True

    @property
    def layout_to_come(self) -> Layout:
        return self._next or self.layout

    @property
    def is_recut_due(self) -> bool:
        return self._next is not None

    @property
    def is_settled(self) -> bool:
        return self._next is None

    def is_carried_by_torch(self, layout: Layout) -> bool:
        """See :meth:`Tunable.is_carried_by_torch`."""
        return False

    def report_to(self, listener: Listener) -> None:
        """See :meth:`Tunable.report_to`."""
        self.listener = listener

    def see_inputs(self, sees: bool) -> None:
        """See :meth:`Tunable.see_inputs`."""
        if self._sees_inputs is not None and not sees:
            self._sees_inputs.remove()
            self._sees_inputs = None
        elif self._sees_inputs is None and sees and (model := self._model()) is not None:
            begins = Unsaved(self._pass_begins)
            self._sees_inputs = model.register_forward_pre_hook(begins, with_kwargs=True)

    def _pass_begins(
        self, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        if is_of_training(model) and not is_in_backward():
            self.observers.call(lambda: self.listener.given(elements_in((args, kwargs))))

    def watch(self) -> None:
        """See :meth:`Tunable.watch`: the ends of steps are seen anyway."""
        return

    def detach(self) -> None:
        """See :meth:`Tunable.detach`."""
        self.listener = NOBODY
        self.see_inputs(False)
        self.vote_in(self.communicator.group, self.communicator.device)

    def leave(self) -> None:
        """Let go of all that was made for the ranks that trained the model: their group was
        destroyed, or the model has another one. Not collective."""
        self._next = None
        self.observers.call(self.listener.left)
        self.detach()
        self.communicator.leave()

    def forget(self) -> None:
        """Take back what looks at the model: it is gone, or nothing is to be changed after all."""
        self.recomputation.forget()

    @property
    def recomputed(self) -> Limit:
        """The row of ``recomputed_blocks`` in the offer."""
        return self.recomputation.limit(None if self.memory is None else self.memory.free_bytes)

    def _fits(self) -> bool:
        """Whether what is in force may stay, by all that is known by now."""
        return self.memory is None or self.memory.misfit(self.layout) is None

    # What a change is made of

    @abstractmethod
    def _put(self, layout: Layout) -> None:
        """Put a layout in force, on this rank. Whatever it raises, all ranks go back."""

    @abstractmethod
    def _described(self, layout: Layout) -> str:
        """The layout that has come into force, for the log."""

    def _make_way(self, layout: Layout) -> None:
        """A layout is about to be put in force: what it takes is measured from now on."""
        self._steps_in_force = 0
        if self.memory is not None:
            self.observers.call(self.memory.begin, layout)

    def _follow(self) -> None:
        """Another layout has come into force."""
        return

    def _go_back(self) -> None:
        """Put in force again what was before, on this rank."""
        self.observers.call(self._put, self.layout)
        self._make_way(self.layout)

    def _carry_out(self) -> bool:
        """Put the scheduled layout in force; whether that worked. All ranks call this together."""
        assert self._next is not None
        began = time.perf_counter()
        layout, self._next = self._next, None
        is_new = layout.digest != self.layout.digest
        self._make_way(layout)
        if not self._on_all_ranks(partial(self._put, layout), self._go_back):
            return False
        self.layout = layout
        self._follow()
        self.recut_seconds = time.perf_counter() - began
        if self.communicator.rank == 0 and is_new:
            milliseconds = self.recut_seconds * 1e3
            logger.debug("autotune: %s in %.1f ms", self._described(layout), milliseconds)
        return True

    def _on_all_ranks(self, change: Callable[[], None], go_back: Callable[[], None]) -> bool:
        """Make ``change`` on all ranks; whether that worked. If one could not, all go back."""
        ranks, error = attempt(change, *self._voters)
        if not ranks:
            return True
        if error:
            logger.error("rank %d %s (%s)", self.communicator.rank, self.cannot, error)
        go_back()
        reason = f"{self.failed} on rank {ranks}"
        if self.communicator.rank == 0:
            logger.error("%s: all ranks went back to %s", reason, self.layout.configuration)
        self.observers.call(self.listener.went_back, reason)
        return False

    def _count_step(self) -> None:
        """A step has been made, on all ranks."""
        self._steps += 1
        self._steps_in_force += 1
        if self._steps_in_force == SETTLED_AFTER and self.memory is not None:
            self.observers.call(self.memory.settle)
        if self._steps == STEPS_SEEN:
            self.observers.call(self.recomputation.conclude)
            if self.memory is not None:
                self.observers.call(self.memory.read)

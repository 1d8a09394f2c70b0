"""What the agent tunes: it plans, votes on, applies and measures configurations. Who listens to it,
and the record of a step.

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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from bagua_client.algorithms import Algorithm
from bagua_client.communication.agreement import Group, attempt
from bagua_client.communication.communicator import Communicator
from bagua_client.configuration import Configuration
from bagua_client.layout import Layout, TensorSpec, plan
from bagua_client.torch_private.reducer import is_in_backward
from bagua_client.torch_private.wrapper import Unsaved
from bagua_client.tunable.looks import Observers
from bagua_client.tunable.memory import MeasuredMemory, memory_of
from bagua_client.tunable.offer import Limit, Offer
from bagua_client.tunable.passes import elements_in, is_of_training
from bagua_client.tunable.recomputation import Recomputation

logger = logging.getLogger(__name__)

STEPS_SEEN = 3
"""The default's memory is known after so many, and the order in which a model is used: what gathers
parameters ahead does so from the second or third on, once it knows it."""
SETTLED_AFTER = 2
"""So many steps after a change, what memory is kept for later fits what is in force."""


@dataclass
class Gathered:
    """Marks of when the parameters of a unit were gathered.

    Attributes:
        index: of the unit's tensor in the model; of several that travel as one, the first one's.
        size_bytes: of all of it, on every rank.
        ended: None: it is not there yet.
    """

    index: int
    size_bytes: int
    started: Any
    ended: Any = None


class Timeline:
    """The record of one step. A step that is not recorded has no overhead.

    Args:
        mark: returns a mark of the current moment: the CPU's time, or an event in the current CUDA
            stream.

    Attributes:
        ready: when each tensor became ready, by its index in the model.
        bucket_bytes: size of each bucket, in the order in which the buckets began to travel.
        started: when each bucket began to travel, in that order.
        ended: when each bucket arrived, by its place in that order; written by any thread.
        gathers: in the order in which they began.
    """

    def __init__(self, mark: Callable[[], Any]) -> None:
        self._mark = mark
        self.ready: dict[int, Any] = {}
        self.bucket_bytes: list[int] = []
        self.started: list[Any] = []
        self.ended: dict[int, Any] = {}
        self.gathers: list[Gathered] = []

    def tensor_ready(self, index: int) -> None:
        """The tensor has its final value for this step."""
        self.ready[index] = self._mark()

    def bucket_starts(self, size_bytes: int) -> Callable[[], None]:
        """The next bucket is about to travel. Returns the function to call when it has arrived."""
        self.bucket_bytes.append(size_bytes)
        self.started.append(self._mark())
        return partial(self._bucket_ends, len(self.started) - 1)

    def _bucket_ends(self, place: int) -> None:
        self.ended[place] = self._mark()

    def gather_starts(self, index: int, size_bytes: int) -> Callable[[], None]:
        """A unit is about to be gathered. Returns the function to call when it is there."""
        gathered = Gathered(index, size_bytes, self._mark())
        self.gathers.append(gathered)

        def ends() -> None:
            gathered.ended = self._mark()

        return ends


class Listener(Protocol):
    """Who is told what happens in a model's steps, on the training thread of each rank. What a
    listener leaves out does nothing."""

    def reduced(self) -> None:
        """A step's communication has ended; all ranks are known to be in the same step."""
        return

    def given(self, elements: float) -> None:
        """A forward pass for training begins, with so many elements in its inputs; NaN: that is
        not known. Only while :meth:`Tunable.see_inputs`; it may only observe."""
        return

    def computed(self) -> None:
        """All that a step communicates is ready on this rank. It may only observe."""
        return

    def waiting(self) -> AbstractContextManager[None]:
        """A context that is entered around a step's other communication."""
        return nullcontext()

    def went_back(self, reason: str) -> None:
        """A change failed on some rank, and all returned to the layout before it. It may only
        observe."""
        return

    def left(self) -> None:
        """The ranks' group is gone. This rank alone is told, and nothing more."""
        return


class Nobody(Listener):
    """Is told in vain."""


NOBODY = Nobody()


class Tunable(ABC):
    """Something whose configuration may change from one step to the next.

    Args:
        communicator: of the ranks that train together.
        model: that they train.
        device: of this rank, on which it is.

    Attributes:
        algorithm: the algorithm that keeps the replicas together.
        communicator: the process groups of the ranks that train the model.
        tensors: specs of the tensors that are communicated.
        parameters: the model's parameters; the steps of their optimizers are counted.
        order: indices of ``tensors``, in the order in which they become ready.
        default: the configuration that the job would run without tuning.
        layout: the layout in force.
        recut_seconds: how long the latest change took.
        listener: who is told what happens; see :meth:`report_to`.
        device_memory: the device's; None: nothing is known of it.
        memory: of this rank's device, as far as configurations differ in it; None: they do not, or
            nothing is known of it.
        recomputation: of the model's blocks.
        observers: by way of which all that only observes is called.
        cannot: what a rank says that could not make a change.
        failed: what all say of it.
    """

    cannot: str
    failed: str
    algorithm: Algorithm
    tensors: Sequence[TensorSpec]
    parameters: Sequence[torch.nn.Parameter]
    order: Sequence[int]
    default: Configuration
    layout: Layout
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
        self._handles: list[RemovableHandle] = []
        self._sees_inputs: RemovableHandle | None = None
        self.recut_seconds = 0.0
        self.vote_in(communicator.group, communicator.device)
        self._next: Layout | None = None
        self._steps = self._steps_in_force = 0
        communicator.when_destroyed(self.leave)

    # Plan

    @property
    @abstractmethod
    def offer(self) -> Offer:
        """What may be changed, and why the rest may not."""

    @property
    def order_is_agreed(self) -> bool:
        """Whether the ranks have compared what they saw of ``order``. All ranks communicate in one
        order, else they would wait for ever."""
        return self._steps >= STEPS_SEEN

    @property
    @abstractmethod
    def refusal(self) -> str:
        """Why no setting can be changed while this training runs; empty: some can."""

    @property
    def is_left(self) -> bool:
        """Whether the model, or its wrapper, is gone."""
        return self._model() is None

    @property
    def stands_back(self) -> bool:
        """Whether the ranks may end their training one by one now, so that nothing is changed."""
        return False

    def plan(self, configuration: Configuration) -> Layout:
        """The layout that ``configuration`` would put in force; changes nothing.

        Raises:
            ValueError: the configuration cannot be carried out.
        """
        configuration = self.recomputation.named(configuration)
        self.offer.check(configuration)
        return plan(self.tensors, self.order, configuration)

    def start_from(self, default: Configuration) -> None:
        """Set another default. All ranks call this together, before the first step.

        Raises:
            ValueError, RuntimeError: it cannot be carried out here; nothing has changed.
        """
        layout = self.plan(default)
        self.prepare(layout)
        self.default = default
        if self.memory is not None:
            self.memory.start_from(layout)
        self.change(layout)

    # Vote

    def vote_in(self, group: Group, device: torch.device) -> None:
        """Vote on changes in ``group``, which communicates from ``device``, from now on."""
        self._voters = group, device

    # Apply

    def prepare(self, layout: Layout) -> None:
        """Make the process groups that ``layout`` needs. All ranks call this together.

        Raises:
            RuntimeError: they cannot be made.
        """
        self.communicator.prepare(layout.configuration)

    def schedule(self, layout: Layout) -> None:
        """Put ``layout`` into force at the end of this step's communication; all ranks have agreed
        on it, and its groups are made."""
        self.prepare(layout)
        self._next = layout

    def change(self, layout: Layout) -> bool:
        """Put ``layout`` into force, at once or as soon as may be. All ranks have agreed on it, and
        call this together.

        Returns:
            Whether that worked, or is still to come. If not, all ranks are back at what they had.
        """
        self.schedule(layout)
        return True

    @property
    def layout_to_come(self) -> Layout:
        """The scheduled layout; the one in force if none is scheduled."""
        return self._next or self.layout

    @property
    def is_recut_due(self) -> bool:
        """Whether a scheduled layout is not in force yet."""
        return self._next is not None

    @property
    def is_settled(self) -> bool:
        """Whether the layout scheduled last is in force, with its final buckets."""
        return self._next is None

    # Measure

    def report_to(self, listener: Listener) -> None:
        """Tell this listener, and no other, what happens from now on, until :meth:`detach`."""
        self.listener = listener

    def attach(self, in_detail: bool = True) -> None:
        """Observe the steps from now on.

        Args:
            in_detail: with all that travels in them; else their ends and how long each computes, as
                cheaply as that can be. All ranks must give the same, at the end of a step.
        """
        return

    def record(self, timeline: Timeline | None) -> None:
        """Record the next steps in ``timeline``; None: stop recording. It stays empty where nothing
        is seen to travel."""
        return

    def is_carried_by_torch(self, layout: Layout) -> bool:
        """Whether nothing of ours is in the way of what travels under ``layout``, unless the steps
        are observed in detail; the same on all ranks."""
        return False

    def see_inputs(self, sees: bool) -> None:
        """Tell the listener how much each forward pass for training is given, or no longer."""
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
        """Observe but the ends of steps from now on, as cheaply as that can be."""
        return

    def detach(self) -> None:
        """Stop observing the steps, and telling of them."""
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
        """Take back what looks at the model: it is gone, or nothing is to be changed after all.
        Whoever is told of that may hold this a while longer."""
        self.recomputation.forget()
        for handle in self._handles:
            handle.remove()

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

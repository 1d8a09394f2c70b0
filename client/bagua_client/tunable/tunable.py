"""The interface that the agent tunes: it plans, votes on, applies and measures configurations. Who
listens to it, and the record of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from bagua_client.algorithms import Algorithm
from bagua_client.communication.agreement import Group
from bagua_client.communication.communicator import Communicator
from bagua_client.configuration import Configuration
from bagua_client.layout import Layout, TensorSpec
from bagua_client.tunable.looks import Observers
from bagua_client.tunable.memory import MeasuredMemory
from bagua_client.tunable.offer import Offer
from bagua_client.tunable.recomputation import Recomputation


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


class Tunable(Protocol):
    """Something whose configuration may change from one step to the next.

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
        memory: of this rank's device, as far as configurations differ in it; None: they do not, or
            nothing is known of it.
        recomputation: of the model's blocks.
        observers: by way of which all that only observes is called.
    """

    recut_seconds: float
    observers: Observers

    @property
    def listener(self) -> Listener: ...
    @property
    def memory(self) -> MeasuredMemory | None: ...
    @property
    def recomputation(self) -> Recomputation: ...
    @property
    def algorithm(self) -> Algorithm: ...
    @property
    def communicator(self) -> Communicator: ...
    @property
    def tensors(self) -> Sequence[TensorSpec]: ...
    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]: ...
    @property
    def order(self) -> Sequence[int]: ...
    @property
    def default(self) -> Configuration: ...
    @property
    def layout(self) -> Layout: ...

    # Plan

    @property
    def offer(self) -> Offer:
        """What may be changed, and why the rest may not."""

    @property
    def order_is_agreed(self) -> bool:
        """Whether the ranks have compared what they saw of ``order``."""

    @property
    def refusal(self) -> str:
        """Why no setting can be changed; empty: some can."""

    @property
    def is_left(self) -> bool:
        """Whether the model's wrapper is gone."""

    @property
    def stands_back(self) -> bool:
        """Whether the ranks may end their training one by one now, so that nothing is changed."""

    def plan(self, configuration: Configuration) -> Layout:
        """The layout that ``configuration`` would put in force; changes nothing.

        Raises:
            ValueError: the configuration cannot be carried out.
        """

    def start_from(self, default: Configuration) -> None:
        """Set another default. All ranks call this together, before the first step.

        Raises:
            ValueError, RuntimeError: it cannot be carried out here; nothing has changed.
        """

    # Vote

    def vote_in(self, group: Group, device: torch.device) -> None:
        """Vote on changes in ``group``, which communicates from ``device``, from now on."""

    # Apply

    def prepare(self, layout: Layout) -> None:
        """Make the process groups that ``layout`` needs. All ranks call this together.

        Raises:
            RuntimeError: they cannot be made.
        """

    def schedule(self, layout: Layout) -> None:
        """Put ``layout`` into force at the end of this step's communication; all ranks have agreed
        on it, and its groups are made."""

    def change(self, layout: Layout) -> bool:
        """Put ``layout`` into force, at once or as soon as may be. All ranks have agreed on it, and
        call this together.

        Returns:
            Whether that worked, or is still to come. If not, all ranks are back at what they had.
        """

    @property
    def layout_to_come(self) -> Layout:
        """The scheduled layout; the one in force if none is scheduled."""

    @property
    def is_recut_due(self) -> bool:
        """Whether a scheduled layout is not in force yet."""

    @property
    def is_settled(self) -> bool:
        """Whether the layout scheduled last is in force, with its final buckets."""

    # Measure

    def report_to(self, listener: Listener) -> None:
        """Tell this listener, and no other, what happens from now on, until :meth:`detach`."""

    def attach(self, in_detail: bool = True) -> None:
        """Observe the steps from now on.

        Args:
            in_detail: with all that travels in them; else their ends and how long each computes, as
                cheaply as that can be. All ranks must give the same, at the end of a step.
        """

    def record(self, timeline: Timeline | None) -> None:
        """Record the next steps in ``timeline``; None: stop recording."""

    def is_carried_by_torch(self, layout: Layout) -> bool:
        """Whether nothing of ours is in the way of what travels under ``layout``, unless the steps
        are observed in detail; the same on all ranks."""

    def see_inputs(self, sees: bool) -> None:
        """Tell the listener how much each forward pass for training is given, or no longer."""

    def watch(self) -> None:
        """Observe but the ends of steps from now on, as cheaply as that can be."""

    def detach(self) -> None:
        """Stop observing the steps, and telling of them."""

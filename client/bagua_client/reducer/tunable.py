"""What the agent tunes: each configuration is planned, voted on, applied and measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.distributed as dist

from bagua_client.algorithms import Algorithm
from bagua_client.communication.communicator import Communicator
from bagua_client.configuration import Configuration
from bagua_client.layout import Layout, TensorSpec
from bagua_client.reducer.offer import Offer
from bagua_client.reducer.timeline import Timeline


class Tunable(Protocol):
    """Something whose configuration may change from one step to the next.

    Attributes:
        algorithm: how the replicas are kept together.
        communicator: of the ranks that train the model.
        tensors: specs of what is communicated.
        parameters: of the model; their optimizers tell the steps.
        order: indices of ``tensors``, in the order in which they become ready.
        default: the configuration that the job would have had.
        layout: what is in force.
        recut_seconds: how long the latest change took.
        after_reduction: called at the end of every step's communication, where all ranks are
            known to be in the same step.
        on_last_ready: called when everything is ready to be communicated on this rank.
        on_return: called with the reason when a change failed on some rank and all went back.
        waiting: a context around other communication of a step.
    """

    recut_seconds: float
    after_reduction: Callable[[], None] | None
    on_last_ready: Callable[[], None] | None
    on_return: Callable[[str], None] | None
    waiting: Callable[[], AbstractContextManager[None]]

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
    def refusal(self) -> str:
        """Why nothing can be changed any more; empty: it can."""

    @property
    def order_is_agreed(self) -> bool:
        """Whether ``order`` was seen, and is the same on all ranks."""

    def plan(self, configuration: Configuration) -> Layout:
        """What would be in force under ``configuration``; changes nothing.

        Raises:
            ValueError: it cannot be carried out.
        """

    def start_from(self, default: Configuration) -> None:
        """Have another default. All ranks, before the first step.

        Raises:
            ValueError, RuntimeError: it cannot be carried out here; nothing has changed.
        """

    # Vote

    def vote_in(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Vote on changes in ``group``, which communicates from ``device``, from now on."""

    # Apply

    def schedule(self, layout: Layout) -> None:
        """Put ``layout`` into force between two steps; all ranks have agreed on it."""

    @property
    def layout_to_come(self) -> Layout:
        """What is in force, or scheduled."""

    @property
    def is_recut_due(self) -> bool:
        """Whether a layout was scheduled that is not in force yet."""

    @property
    def is_settled(self) -> bool:
        """Whether what was scheduled last is in force, and will stay as it is."""

    # Measure

    def attach(self) -> None:
        """Follow the steps from now on."""

    def detach(self) -> None:
        """Follow them no longer."""

    def record(self, timeline: Timeline | None) -> None:
        """Where the steps to come are recorded; None: they are not."""

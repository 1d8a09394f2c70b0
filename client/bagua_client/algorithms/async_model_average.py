"""Weights averaged in rounds that no rank waits for."""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from bagua_client.algorithms.base import Algorithm, Weights, register
from bagua_client.communication.agreement import Vote
from bagua_client.communication.communicator import Communicator
from bagua_client.configuration import Configuration

WARM_UP, APART = 1, 2
"""Phases."""


_workers: weakref.WeakSet[AsyncModelAverageAlgorithm] = weakref.WeakSet()


class _Round:
    """A sum of all ranks' weights on its way."""

    def __init__(self, weights: Weights, group: dist.ProcessGroup) -> None:
        self._weights = weights
        self._parts = []
        for parameters in weights.whole:
            sent = weights.flat(parameters)
            total = sent.clone()
            self._parts.append((parameters, sent, total))
        self._works = [
            dist.all_reduce(total, group=group, async_op=True) for _, _, total in self._parts
        ]

    def is_over(self) -> bool:
        return all(work is None or work.is_completed() for work in self._works)

    def apply(self, is_kept: bool = True) -> None:
        """Wait for its end, and move the weights to the mean: by as much as they were off it when
        they were sent, so that what was learned since is kept, or to the mean itself."""
        for work in self._works:
            if work is not None:
                work.wait()
        ranks = self._weights.communicator.world_size
        for parameters, sent, total in self._parts:
            mean = total.div_(ranks)
            moved = self._weights.flat(parameters).add_(mean.sub(sent)) if is_kept else mean
            self._weights.write(parameters, moved)


@register("async", "weights are averaged now and then, and no rank waits for another")
class AsyncModelAverageAlgorithm(Algorithm):
    """Each rank trains by itself. From time to time all ranks send their weights, and each rank
    moves towards the mean (after Lian et al., Asynchronous Decentralized Parallel SGD, ICML 2018).
    With ``c`` the weights that a rank sent and ``x`` its weights now: ``x += mean of c - c``.

    A rank begins a round, and applies its result, when a forward pass begins. So weights do not
    change during a step, an evaluation or a checkpoint. A round is over when the last rank has
    joined it; meanwhile the others train on. No thread is used. The replicas differ; :meth:`abort`
    can make them equal.

    Args:
        peer_selection_mode: only ``all``.
        sync_interval_ms: milliseconds from the end of a round to the start of the next; 0 or less:
            no rounds.
        warmup_steps: in so many first steps gradients are averaged instead.

    Raises:
        ValueError: another mode.
    """

    moves_weights = True
    needs_all_ranks = True
    obstacle = "under an asynchronous algorithm the ranks do not step together"

    def __init__(
        self, peer_selection_mode: str = "all", sync_interval_ms: int = 500, warmup_steps: int = 0
    ) -> None:
        if peer_selection_mode != "all":
            raise ValueError(f"peer_selection_mode must be 'all', not {peer_selection_mode!r}")
        self.peer_selection_mode = peer_selection_mode
        self.sync_interval_ms = sync_interval_ms
        self.warmup_steps = warmup_steps
        self.rounds = 0
        self._steps = 0
        self._is_aborted = False
        self._may_move = True
        self._next_seconds = 0.0
        self._round: _Round | None = None
        self._group: dist.ProcessGroup | None = None
        self._weights: Weights | None = None
        self.begin(WARM_UP)

    def reify(self, communicator: Communicator) -> AsyncModelAverageAlgorithm:
        worker = copy.copy(self)
        _workers.add(worker)
        return worker

    def check(self, communicator: Communicator, configuration: Configuration) -> None:
        if communicator.obstacle:
            raise ValueError(
                f"{self.name} needs a process group of its own: {communicator.obstacle}"
            )

    @property
    def phase(self) -> int:
        return WARM_UP if self._steps < self.warmup_steps else APART

    @property
    def progress(self) -> int:
        return self._steps

    def begin(self, phase: int) -> None:
        self.leaves_gradients = self.is_apart = phase == APART

    def end(self) -> None:
        self._stop()
        _workers.discard(self)  # The model's next one may be of this kind, too.
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def forward_begins(self, weights: Weights) -> None:
        self._weights = weights
        if self._group is None or self._is_aborted or self.sync_interval_ms <= 0:
            return
        # Not while a pass that has had no backward one may need the weights as they are.
        if self._round is not None and self._may_move and self._round.is_over():
            self._finish()
        self._may_move = False
        if self._round is None and time.monotonic() >= self._next_seconds:
            self._start(weights)

    def backward_begins(self, weights: Weights) -> None:
        # The ranks do not begin their rounds together, and may begin one in a pass of their own.
        if self.leaves_gradients and self._group is None:
            self._group = _new_group(weights)

    def backward_ends(self, weights: Weights) -> None:
        self._steps += 1
        self._may_move = True

    def _start(self, weights: Weights) -> None:
        if self._group is None:  # Aborted by all ranks before they have begun.
            self._group = _new_group(weights)
        self.rounds += 1
        self._round = _Round(weights, self._group)

    def _finish(self, is_kept: bool = True) -> None:
        assert self._round is not None
        finished, self._round = self._round, None
        finished.apply(is_kept)
        self._next_seconds = time.monotonic() + self.sync_interval_ms / 1e3

    def abort(self, model: torch.nn.Module, average: bool = False) -> None:
        """End the rounds of ``model``, wrapped or not; that under way is brought to its end. All
        ranks must call it, between two steps, and wait here for the last one. Called again it does
        nothing.

        Args:
            average: make the replicas equal, by one more round.

        Raises:
            ValueError: the model does not train so.
        """
        worker = _worker_of(model)
        worker._stop()
        if average and worker._weights is not None:
            worker._start(worker._weights)
            worker._finish(is_kept=False)

    def _stop(self) -> None:
        """Bring the round that is under way on any rank to its end, and begin no other."""
        self._is_aborted = True
        weights = self._weights
        if weights is None:
            return
        communicator = weights.communicator
        rounds = Vote(self.rounds, communicator.group, communicator.device).values()
        if self.rounds < max(rounds):
            if self._round is not None:
                self._finish()
            self._start(weights)  # Another rank has begun it, and waits for this one.
        if self._round is not None:
            self._finish()

    def resume(self, model: torch.nn.Module) -> None:
        """Begin the rounds of ``model`` again. All ranks must call it.

        Raises:
            ValueError: the model does not train so.
        """
        _worker_of(model)._is_aborted = False

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._steps = state["steps"]


def _new_group(weights: Weights) -> dist.ProcessGroup:
    communicator = weights.communicator
    return communicator.new_group([range(communicator.world_size)])


def _worker_of(model: torch.nn.Module) -> AsyncModelAverageAlgorithm:
    parameters = {id(parameter) for parameter in model.parameters()}
    for worker in _workers:
        if not parameters.isdisjoint(worker.names):
            return worker
    raise ValueError(f"this {type(model).__name__} does not train with algorithm 'async'")

"""The micro-batches of a step of the optimizer: how many there are, and which of them use what an
earlier one has gathered."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median_low
from typing import Any

import torch

from bagua_client.torch_private.sharded import Unit, checksums
from bagua_client.tunable.looks import seen

STEPS_REMEMBERED = 5
STEPS_LOOKED_AT = 2
"""So many steps of several micro-batches must have shown that no weight changes unseen."""
MOST_PASSES_AWAITED = 32
"""So many passes a step of an optimizer is waited for."""
NO_OPTIMIZER = "no step of an optimizer of torch's was seen"
NOT_SEEN = "the weights are of a kind that cannot be looked at"
STEPS_IN_BACKWARD = "an optimizer steps in the backward pass"
NOT_TOLD = (
    "the training does not tell which micro-batch is the last (model.report_last_micro_batch, or "
    "torch's set_is_last_backward)"
)
ENDED_BY_HAND = "the training itself ends each backward pass (set_manual_backward_finalization)"
REDUCED_ONCE = "the training itself reduces them in one micro-batch of each step"
GRADIENTS_USED = "the training writes to gradients between two micro-batches"
WRITTEN_UNSEEN = "the training writes to weights' data between two micro-batches, which nobody sees"
"""Why nothing may be kept over micro-batches, or left to the last."""


class MicroBatches:
    """How many passes a step of the optimizer has, and which of them use what an earlier one has
    gathered.

    A gathering is a communication, so all ranks must come to the same answers. They make the same
    passes; so what counts is the number of them, and where the optimizer steps, or weights are
    written, earlier than that.

    Attributes:
        is_known: whether ``usual`` and ``obstacle`` have been found out.
        obstacle: why nothing may be kept over them; empty: it may, or that is not known yet.
        undeferrable: why nothing may be left to the last one; the same.
        told_last: whether the training says that the next is the last.
        is_deferring: whether reductions are left to the last one now.
    """

    is_known, obstacle, undeferrable = False, "", ""
    told_last, is_deferring = True, False

    def __init__(self) -> None:
        self._looked_at = 0
        self._first: tuple[Any, torch.Tensor] | None = None
        self._unseen: list[torch.Tensor] = []
        self._told: list[bool] = []
        self._gradients: torch.Tensor | None = None
        self._used: list[torch.Tensor] = []
        self._counts: deque[int] = deque(maxlen=STEPS_REMEMBERED)
        self._since_step = self._since_gathered = 0
        self._versions: Any = None
        self._stays = False

    @property
    def usual(self) -> int:
        """Of the last steps; 0: there was none. A step that one rank leaves out, as for a loss that
        is not finite, changes nothing."""
        return median_low(self._counts) if self._counts else 0

    def pass_begins(self, units: Sequence[Unit]) -> None:
        """A forward pass that a backward pass may follow."""
        self._since_step += 1
        if self.is_known:
            return
        if not self._counts and self._since_step >= MOST_PASSES_AWAITED:
            self.rule_out(NO_OPTIMIZER)
        elif self.usual > 1 and not seen(lambda: self._look(units), False):
            self.rule_out(NOT_SEEN)

    def rule_out(self, reason: str) -> None:
        """Nothing may be kept or deferred, for this reason."""
        self.is_known, self.obstacle, self.undeferrable = True, reason, reason

    def _look(self, units: Sequence[Unit]) -> bool:
        """Remember whether weights have changed that seem not to have; always True."""
        versions, found = [unit.versions for unit in units], _sums(unit.parts for unit in units)
        if self._gradients is not None:
            now = _sums(unit.gradients for unit in units)
            is_same = now.shape == self._gradients.shape
            self._used.append((now != self._gradients).any() if is_same else torch.tensor(True))
        if self._since_step == 1 or self._first is None or self._first[0] != versions:
            self._first = versions, found
        else:
            self._unseen.append((found != self._first[1]).any())
        return True

    def reduced(self, units: Sequence[Unit]) -> None:
        """A backward pass has reduced its gradients."""
        if not self.is_known:
            self._told.append(self.is_last(units))
            if units[0].is_ended_by_hand:
                self.undeferrable = self.undeferrable or ENDED_BY_HAND
            self._gradients = _sums(unit.gradients for unit in units)

    def is_last(self, units: Sequence[Unit]) -> bool:
        """Whether the training says that the pass under way is the step's last."""
        return self.told_last and units[0].is_last_backward

    def step_ends(self) -> None:
        """An optimizer of the model's has stepped."""
        count, self._since_step = self._since_step, 0
        if count:
            self._counts.append(count)
        told, self._told, self._gradients = self._told, [], None
        if self.is_known:
            return
        if self._first is not None:
            self._looked_at += 1
            is_told = len(told) > 1 and told == [False] * (len(told) - 1) + [True]
            if count > 1 and not (is_told or self.is_deferring):
                reason = REDUCED_ONCE if len(told) == 1 else NOT_TOLD
                self.undeferrable = self.undeferrable or reason
        if self.usual == 1 or self._looked_at >= STEPS_LOOKED_AT:
            self.is_known = True
            self.obstacle = WRITTEN_UNSEEN if any(map(bool, self._unseen)) else ""
            if any(map(bool, self._used)):
                self.undeferrable = self.undeferrable or GRADIENTS_USED
            self._first, self._unseen, self._used = None, [], []

    def goes_on(self, versions: Any) -> bool:
        """Whether the pass that begins may use what was gathered, if these are the weights'
        versions."""
        stays, self._stays = self._stays, False
        if not stays or versions != self._versions:
            return False
        self._since_gathered += 1
        return True

    def begin(self, versions: Any) -> None:
        """The pass that begins gathers weights of these versions."""
        self._versions, self._since_gathered = versions, 1

    def stays(self, is_reduced: bool) -> bool:
        """Whether the pass under way leaves what is gathered for the next one.

        Args:
            is_reduced: whether the gradients are; a training that accumulates them tells by this
                which pass is the last.
        """
        self._stays = not is_reduced or self._since_gathered < self.usual
        return self._stays

    def let_go(self) -> None:
        """Nothing is gathered any more."""
        self._stays = False


def _sums(tensors: Iterable[Sequence[torch.Tensor]]) -> torch.Tensor:
    return checksums([tensor for each in tensors for tensor in each])

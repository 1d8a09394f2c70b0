"""Watches the loss: what makes it worse is given up, however fast its steps are.

The first look is at trials: a few steps under each are compared with some of the job's own way. The
second is at what was kept, for as long as the training runs; see second_look.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from bagua_client.guard.losses import DEVIATIONS, MARGIN, Losses
from bagua_client.guard.second_look import SecondLook

FEWEST_LOSSES = 8
REMEMBERED_REPORTS = 32
MOST_UNREAD = 1024
# Of all reports. Few: where a loss falls, those of long ago are higher than usual.
REPORTS_TOGETHER = 8


class LossGuard:
    """Compares the losses of trials that change the numbers with those of trials that do not. All
    ranks give it the same losses, so it decides the same on all.

    Attributes:
        has_any: whether this rank was told a loss.
    """

    def __init__(self) -> None:
        self.has_any = False
        self._own: deque[tuple[torch.Tensor, Any]] = deque(maxlen=MOST_UNREAD)
        self._usual: deque[Losses] = deque(maxlen=REMEMBERED_REPORTS)
        self._tried: deque[Losses] = deque(maxlen=REMEMBERED_REPORTS)
        # With how they changed the numbers: most trials are too short to be judged alone.
        self._last: deque[tuple[object, Losses]] = deque(maxlen=REPORTS_TOGETHER)
        self._change: object = None
        self._second_look = SecondLook()
        self._is_kept = self._is_paused = False

    # One rank's

    def tell(self, loss: torch.Tensor | float) -> None:
        """Take this rank's loss in one step; a tensor of several is averaged. Waits for no device.

        Raises:
            TypeError: neither a tensor nor a number.
        """
        if not isinstance(loss, torch.Tensor | float | int):
            raise TypeError(f"a loss must be a tensor or a number, not {type(loss).__name__}")
        self.has_any = True
        value = torch.as_tensor(loss).detach().double().mean()
        event: Any = None
        if value.device.type == "cuda":
            with torch.cuda.device(value.device):
                copy = torch.empty((), dtype=torch.float64, pin_memory=True)
                value = copy.copy_(value, non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
        self._own.append((value, event))

    def take(self) -> Losses:
        """Return this rank's losses that are known by now, each once; none while configurations
        change.
        """
        known = []
        while self._own and (self._own[0][1] is None or self._own[0][1].query()):
            known.append(float(self._own.popleft()[0]))
        if self._is_paused:
            return Losses()
        return Losses.of(known)

    # All ranks'

    def pause(self) -> None:
        """Take no losses: another configuration is about to come into force."""
        self._is_paused = True

    def begin(self, change: object, is_kept: bool = False) -> None:
        """Begin with another configuration, which is in force now; forgets the losses that were not
        taken.

        Args:
            change: how it changes the numbers; None: not at all.
            is_kept: it was not put in force as a trial, but stays.
        """
        self._is_paused, self._change = False, change
        self._is_kept = is_kept and change is not None
        self._own.clear()
        self._tried.clear()
        if self._is_kept:
            self._second_look.begin()

    def judge(self, by_rank: Sequence[Losses]) -> str:
        """Judge the ranks' losses under what is in force; says what is wrong, if anything is.

        Those of a trial are judged alone, and with those of the last ones that changed the numbers
        in the same way.
        """
        losses, steps = Losses.sum(by_rank), max(each.told for each in by_rank)
        if not losses.told:
            return ""
        if self._is_kept:
            self._last.clear()
            return self._second_look.judge(losses, steps)
        self._last.append((self._change, losses))
        if self._change is None:
            self._second_look.learn(losses, steps)
            self._usual.append(losses)
            return ""
        self._tried.append(losses)
        alike = Losses.sum(told for change, told in self._last if change == self._change)
        usual = Losses.sum(self._usual)
        return _harm(Losses.sum(self._tried), usual) or _harm(alike, usual)


def _harm(tried: Losses, usual: Losses) -> str:
    """What is wrong with the losses of trials that change the numbers, if anything is."""
    if usual.steps < FEWEST_LOSSES or usual.lost:
        return ""
    if tried.lost:
        return f"the loss is not finite; it was {usual.mean:.4g} before"
    if tried.steps < FEWEST_LOSSES:
        return ""
    error = math.sqrt(usual.variance / usual.steps + tried.variance / tried.steps)
    most = usual.mean + MARGIN * abs(usual.mean) + DEVIATIONS * error
    if tried.mean <= most:
        return ""
    return (
        f"the loss is {tried.mean:.4g}; it was {usual.mean:.4g} before, and only "
        f"up to {most:.4g} would be chance"
    )

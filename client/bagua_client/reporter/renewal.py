"""When to tell the service that the training is alive, beside all other reports."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from statistics import median

from bagua_client.service.client import Progress, StepTimes

RENEWAL_SECONDS = 45.0
"""The page warns of a minute's silence; after five minutes the service takes the job for lost."""
STANDSTILL_SECONDS = 1800.0
"""Time after which ranks that hang have been ended: it is torch's longest usual timeout of a
collective. An evaluation may be as long.
"""
PROGRESS_SECONDS = 600.0
"""Seconds between two progresses of a tuned job: each makes the service sum the job up anew."""
STEPS_REMEMBERED = 1000


class Renewal:
    """Due every 45 seconds, whatever changes; not if the training stands still for too long.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stepped_at = self._renewed_at = self._told_at = clock()
        self._untold: deque[StepTimes] = deque(maxlen=STEPS_REMEMBERED)

    def stepped(self) -> None:
        """The training told something."""
        self._stepped_at = self._clock()

    def watched(self, steps: Iterable[StepTimes]) -> None:
        """The tuned job made these steps."""
        self._untold.extend(steps)

    def take_due(self) -> bool:
        """Whether it is time; then the next is due 45 seconds later."""
        now = self._clock()
        if now - self._renewed_at < RENEWAL_SECONDS:
            return False
        self._renewed_at = now
        return now - self._stepped_at < STANDSTILL_SECONDS

    def take_progress(self, at_once: bool = False) -> Progress | None:
        """Return how far the tuned job is, if that is new.

        Args:
            at_once: also if it was told less than ten minutes ago.
        """
        now = self._clock()
        if not self._untold or (now - self._told_at < PROGRESS_SECONDS and not at_once):
            return None
        self._told_at = now
        seconds = median(max(step.seconds) for step in self._untold)
        progress = Progress(self._untold[-1].step, seconds)
        self._untold.clear()
        return progress

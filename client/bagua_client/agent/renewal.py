"""When to tell the service that the training is alive, beside all other reports."""

from __future__ import annotations

import time
from collections.abc import Callable

RENEWAL_SECONDS = 45.0
"""The page warns of a minute's silence; after five minutes the service takes the job for lost."""
STANDSTILL_SECONDS = 1800.0
"""Ranks that hang are ended by then: it is torch's longest usual timeout of a collective. An
evaluation may be as long."""


class Renewal:
    """Due every 45 seconds, whatever changes; not if the training stands still for too long.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stepped_at = self._renewed_at = clock()

    def stepped(self) -> None:
        """The training told something."""
        self._stepped_at = self._clock()

    def take_due(self) -> bool:
        """Whether it is time; then the next is due 45 seconds later."""
        now = self._clock()
        if now - self._renewed_at < RENEWAL_SECONDS:
            return False
        self._renewed_at = now
        return now - self._stepped_at < STANDSTILL_SECONDS

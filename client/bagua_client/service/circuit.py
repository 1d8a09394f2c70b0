"""When to ask a service again that did not answer, and which lines tell the user about it."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable

from bagua_client.service.transport import ServiceDenied, ServiceUnavailable

logger = logging.getLogger(__name__)

OPENS_AFTER = 4
"""Failures in a row from which on the user is told."""
FIRST_PAUSE_SECONDS = 0.2
EAGER_PAUSE_SECONDS = 5.0
LATE_PAUSE_SECONDS = 60.0
DENIED_PAUSE_SECONDS = 600.0
"""A token may be changed while the job runs."""

_own = random.Random()
"""The training's generator draws what it would draw without us."""


class Circuit:
    """Closed while the service answers; open after several failures in a row. The first answer
    closes it again. Opening and closing each write one line to the log.

    Pauses grow exponentially and are drawn from all that are shorter, so that the jobs of a cluster
    do not come back together ("full jitter": Brooker, Exponential Backoff And Jitter, AWS
    Architecture Blog, 2015).

    Args:
        eager_seconds: the service is asked often for so long, then seldom.
        draw: a number between two others.
        clock: seconds.
    """

    def __init__(
        self,
        eager_seconds: float,
        draw: Callable[[float, float], float] = _own.uniform,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._eager_seconds = eager_seconds
        self._draw = draw
        self._clock = clock
        self._failures = 0
        self._failing_since = 0.0
        self._is_open = self._is_denied = False

    @property
    def is_late(self) -> bool:
        """Whether no answer is to be expected soon: the service has been away for longer than it is
        eagerly looked for, or wants another token."""
        is_long = self._clock() - self._failing_since > self._eager_seconds
        return self._failures > 0 and (is_long or self._is_denied)

    def failed(self, place: str, error: ServiceUnavailable) -> float:
        """A request had no answer; so many seconds to wait before the next.

        Args:
            place: where the service was looked for, in words.
        """
        if not self._failures:
            self._failing_since = self._clock()
        self._failures += 1
        is_denied = isinstance(error, ServiceDenied)
        if is_denied > self._is_denied or (self._failures >= OPENS_AFTER and not self._is_open):
            logger.warning(
                "autotune: the service %s cannot be used: %s. Training continues with its current "
                "configuration; tuning resumes when the service answers again",
                place,
                error,
            )
            self._is_open, self._is_denied = True, is_denied
        if is_denied:
            return self._draw(DENIED_PAUSE_SECONDS / 2, DENIED_PAUSE_SECONDS)
        most = LATE_PAUSE_SECONDS if self.is_late else EAGER_PAUSE_SECONDS
        # The exponent has a bound of its own: a job may look for its service for months.
        grown = FIRST_PAUSE_SECONDS * 2.0 ** min(self._failures - 1, 30)
        return error.retry_after_seconds + self._draw(0.0, min(most, grown))

    def answered(self) -> None:
        """A request had one."""
        if self._is_open:
            logger.info("autotune: the service answers again")
        self._failures = 0
        self._is_open = self._is_denied = False

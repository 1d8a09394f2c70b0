"""Whether the service is silent, and for how long a trial then bears it.

It stands alone because two threads meet in it, and nowhere else without waiting: the reporter's
asks the service, the training's looks whether it was answered. A request may hang for a minute.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SILENT_SECONDS = 5.0
"""A service that is only slow, or is started again at once, mostly answers by then."""
SILENT_REDUCTIONS = 3
"""About what it costs to leave a trial and to come back to it: slow steps after either switch.
Without it a job with steps of ten seconds would leave for any service that is started again.
"""
FIRST_REST_SECONDS = 10.0
MOST_REST_SECONDS = 300.0
FORGIVEN_SECONDS = 1800.0
"""Time without another absence after which the next one is a first one again."""


class Absence:
    """The service is silent while a request is under way, with all its repetitions; it is away once
    that has lasted, in seconds and in steps. While nothing is asked, nothing is missed.

    Once the ranks have left a trial for that, they rest: no trial is begun for a while, which
    doubles with every absence. So a service that blinks has them re-cut once in five minutes.

    Args:
        patience_seconds: how long it may be silent.
        leave: called on the training thread when the service is away; returns whether there was a
            trial to leave. The request is still under way when it returns.
        clock: seconds.
    """

    def __init__(
        self,
        patience_seconds: float,
        leave: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._patience_seconds = patience_seconds
        self._leave = leave
        self._clock = clock
        self._lock = threading.Lock()
        self._asked_at: float | None = None
        self._reductions: int | None = None  # when the training first saw that it was silent
        self._left_at = -math.inf
        self._rest_seconds = 0.0

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Around a request, until there is an answer that can be used, or nobody waits for it."""
        with self._lock:
            self._asked_at = self._clock()
        try:
            yield
        finally:
            with self._lock:
                self._asked_at = self._reductions = None

    def look(self, reductions: int) -> None:
        """On the training thread, after so many reductions: leave if the service is away."""
        with self._lock:
            if self._asked_at is None:
                return
            if self._reductions is None:
                self._reductions = reductions
            now = self._clock()
            is_long = now - self._asked_at >= self._patience_seconds
            if is_long and reductions - self._reductions >= SILENT_REDUCTIONS and self._leave():
                is_first = now - self._left_at > FORGIVEN_SECONDS
                longer = FIRST_REST_SECONDS if is_first else 2 * self._rest_seconds
                self._left_at, self._rest_seconds = now, min(longer, MOST_REST_SECONDS)

    @property
    def rests(self) -> bool:
        """Whether the ranks had better not begin a trial yet."""
        return self._clock() - self._left_at < self._rest_seconds

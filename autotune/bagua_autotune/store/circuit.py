"""A database server that gives no answer must not hold up all who ask, one after the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from bagua_autotune.store.errors import NoAnswer

RETRY_SECONDS = 2.0


class Circuit:
    """After a failure lets nobody ask, but for one every RETRY_SECONDS, until one is answered.

    Args:
        clock: seconds that only go on.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._next_try: float | None = None

    def enter(self) -> None:
        """Raises NoAnswer unless the server may be asked now."""
        with self._lock:
            if self._next_try is None:
                return
            now = self._clock()
            if now < self._next_try:
                raise NoAnswer("the database gave no answer a moment ago")
            self._next_try = now + RETRY_SECONDS

    def answered(self) -> None:
        """The server lives."""
        with self._lock:
            self._next_try = None

    def failed(self) -> None:
        """It could not be reached, or said nothing in time."""
        with self._lock:
            self._next_try = self._clock() + RETRY_SECONDS

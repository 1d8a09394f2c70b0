"""Decisions beside the requests: no rank waits while a Gaussian process is fitted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)

# Fits are bound by Python's lock: more at once only slow the requests down.
MOST_AT_ONCE = 2


class Background(Protocol):
    """Where decisions are made.

    The smallest is::

        class AtOnce:
            def start(self, key, work): work()
            def is_busy(self, key): return False
    """

    def start(self, key: str, work: Callable[[], object]) -> None:
        """Do the work soon, never at the same time as other work of the key.

        Of work that waits for its turn the latest is done.
        """

    def is_busy(self, key: str) -> bool:
        """Whether some of this key is under way, or waits."""


class AtOnce:
    """In the calling thread."""

    def start(self, key: str, work: Callable[[], object]) -> None:
        work()

    def is_busy(self, key: str) -> bool:
        return False


class Pool:
    """A few threads for all jobs. Who asked first comes first; who asks again waits behind the
    others. They end with the process: what one has not stored is decided again later.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, Callable[[], object]] = {}
        self._under_way: set[str] = set()
        self._threads = 0
        self._guard = threading.Lock()

    def start(self, key: str, work: Callable[[], object]) -> None:
        with self._guard:
            self._waiting[key] = work  # one that waits keeps its place
            if self._threads == MOST_AT_ONCE:
                return
            self._threads += 1
        threading.Thread(target=self._run, name="decisions", daemon=True).start()

    def is_busy(self, key: str) -> bool:
        with self._guard:
            return key in self._under_way or key in self._waiting

    def _run(self) -> None:
        while (turn := self._next_turn()) is not None:
            key, work = turn
            try:
                work()
            except Exception:
                logger.exception(
                    "job %s: a decision failed; it is tried again at the next report", key
                )
            with self._guard:
                self._under_way.discard(key)

    def _next_turn(self) -> tuple[str, Callable[[], object]] | None:
        """The first that waits and is not under way; without one the thread ends."""
        with self._guard:
            key = next((key for key in self._waiting if key not in self._under_way), None)
            if key is None:
                self._threads -= 1
                return None
            self._under_way.add(key)
            return key, self._waiting.pop(key)

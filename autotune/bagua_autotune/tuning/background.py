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
        """Do the work soon, unless some of the same key is under way."""

    def is_busy(self, key: str) -> bool:
        """Whether some of this key is under way."""


class AtOnce:
    """In the calling thread."""

    def start(self, key: str, work: Callable[[], object]) -> None:
        work()

    def is_busy(self, key: str) -> bool:
        return False


class DaemonThreads:
    """Threads that end with the process: what one has not stored is decided again later."""

    def __init__(self) -> None:
        self._under_way: set[str] = set()
        self._guard = threading.Lock()
        self._turns = threading.Semaphore(MOST_AT_ONCE)

    def start(self, key: str, work: Callable[[], object]) -> None:
        with self._guard:
            if key in self._under_way:
                return
            self._under_way.add(key)
        thread = threading.Thread(target=self._run, args=(key, work), name="decision", daemon=True)
        thread.start()

    def is_busy(self, key: str) -> bool:
        with self._guard:
            return key in self._under_way

    def _run(self, key: str, work: Callable[[], object]) -> None:
        try:
            with self._turns:
                work()
        except Exception:
            logger.exception("job %s: a decision failed; it is tried again at the next report", key)
        finally:
            with self._guard:
                self._under_way.discard(key)

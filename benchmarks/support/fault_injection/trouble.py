"""A service that is killed, restarted, frozen and cut off while jobs use it."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path

from benchmarks.testbed.job import free_port
from tests.autotune.server import ServeProcess

from .proxy import FaultyProxy

TROUBLES = ("kill", "restart", "freeze", "cut off")
QUIET_SECONDS = 2.0, 6.0
QUIET_STARTS = 2.0
"""After so many times what a start takes: on a slow machine the service would only be started."""
TROUBLE_SECONDS = 0.5, 3.0


class TroubledService:
    """Context manager: ``bagua-autotune serve`` behind a faulty proxy is killed, restarted, frozen
    and cut off until the block ends.

    Args:
        seed: decides which trouble comes when, and for how long.

    Attributes:
        proxy: where jobs find it.
        troubles: how often it had each.
    """

    def __init__(self, database: Path, seed: int) -> None:
        self._database = database
        self._port = free_port()
        self._service = self._start()
        self.proxy = FaultyProxy(self._port, seed)
        self.troubles: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._trouble)

    def __enter__(self) -> TroubledService:
        self.proxy.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.proxy.__exit__(None, None, None)
        self._service.stop()
        self._service.__exit__(None, None, None)

    def _start(self) -> ServeProcess:
        began = time.monotonic()
        service = ServeProcess(self._database, "--port", str(self._port)).__enter__()
        self._start_seconds = time.monotonic() - began
        return service

    def _quiet_seconds(self) -> float:
        return self._random.uniform(*QUIET_SECONDS) + QUIET_STARTS * self._start_seconds

    def _trouble(self) -> None:
        while not self._over.wait(self._quiet_seconds()):
            trouble = self._random.choice(TROUBLES)
            self._make(trouble, self._random.uniform(*TROUBLE_SECONDS))
            self.troubles[trouble] += 1

    def _make(self, trouble: str, seconds: float) -> None:
        if trouble == "cut off":
            self.proxy.is_cut.set()
            self._over.wait(seconds)
            self.proxy.is_cut.clear()
        elif trouble == "freeze":
            self._service.process.send_signal(signal.SIGSTOP)
            self._over.wait(seconds)
            self._service.process.send_signal(signal.SIGCONT)
        else:
            if trouble == "restart":
                self._service.stop()
            self._service.__exit__(None, None, None)
            self._over.wait(seconds)
            self._service = self._start()

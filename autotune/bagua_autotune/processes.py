"""Several processes that serve one address: to the database they are replicas.

This process only watches them, and starts again one that ends. It has a listening socket for each,
among which the kernel shares the connections out, and keeps it: what connects while a process is
started again waits for the new one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator

from bagua_autotune.store.errors import StoreError

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
READY = b"ready"
# Takes the process's number, and what to call once it takes requests; returns when it is to end.
Serve = Callable[[int, Callable[[], None]], None]


class ServeError(Exception):
    """The service cannot start; the message says why and what to do."""


class Processes:
    """Context manager: so many processes; all of them are ended with the block.

    Raises:
        ServeError: one of them ended before it took requests; its log says why.
    """

    def __init__(self, count: int, serve: Serve) -> None:
        self._count = count
        self._serve = serve
        self._numbers: dict[int, int] = {}

    def __enter__(self) -> Processes:
        try:
            for number in range(self._count):
                self._start(number)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def watch(self) -> None:
        """Start again each process that ends, for ever."""
        while True:
            pid, status = os.wait()
            number = self._numbers.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            how = f"by signal {-code}" if code < 0 else f"with status {code}"
            logger.error(
                "process %d of the service (pid %d) ended %s; it is started again",
                *(number, pid, how),
            )
            self._start(number)

    def _start(self, number: int) -> None:
        """Start the process of this number, and wait until it takes requests."""
        reading, writing = os.pipe()
        with _without_signals():
            pid = os.fork()
            if not pid:
                os.close(reading)
                self._run(number, writing)
            self._numbers[pid] = number
        os.close(writing)
        with open(reading, "rb") as pipe:
            if pipe.read() != READY:
                raise ServeError(f"process {number} of the service could not be started: see above")

    def _run(self, number: int, writing: int) -> None:
        """What the new process does; never returns."""

        def ready() -> None:
            os.write(writing, READY)
            os.close(writing)

        status = 1
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            self._serve(number, ready)
            status = 0
        except SystemExit:
            status = 0  # a signal ended it
        except (ServeError, StoreError) as error:
            logger.error("%s", error)
        except BaseException:
            logger.exception("process %d of the service failed", number)
        finally:
            logging.shutdown()
            sys.stdout.flush()
            os._exit(status)

    def _end(self) -> None:
        for pid in self._numbers:
            os.kill(pid, signal.SIGTERM)  # not reaped yet, so it is still theirs
        for pid in self._numbers:
            os.waitpid(pid, 0)
        self._numbers.clear()


@contextlib.contextmanager
def _without_signals() -> Iterator[None]:
    """Signals that end the service wait: a process that was just made must not miss them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

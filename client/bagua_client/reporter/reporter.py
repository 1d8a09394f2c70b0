"""Rank 0's reporter as the training thread sees it: what that calls here never waits.

What there is to tell goes through the inbox to a thread of its own, which has the conversation with
the service; the command that comes of it lies here until the ranks are told.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from bagua_client.announcement import ENDED_FIRST, announce
from bagua_client.environment import Environment
from bagua_client.measuring.rank_measurement import StepCount
from bagua_client.reporter.conversation import Conversation
from bagua_client.reporter.copies import Handover
from bagua_client.reporter.inbox import Event, Inbox, Message
from bagua_client.service.sidecar import job_service
from bagua_client.threads import TorchThread
from bagua_wire.messages import VOIDING

logger = logging.getLogger(__name__)

GOODBYE_SECONDS = 1.0
WATCHED_GOODBYE_SECONDS = 0.2
"""A job that is only being watched has its result already."""


class Reporter:
    """Starts the thread that registers the job and reports its steps, and holds the command that
    the ranks run next.

    Args:
        environment: the settings.
        description: what the job is registered with.
        handover: of what is known to the other nodes.
        count: of the training's steps.
        clock: seconds, in which the service's silence is counted.
    """

    def __init__(
        self,
        environment: Environment,
        description: Mapping[str, Any],
        handover: Handover | None = None,
        count: StepCount | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count = count or StepCount()
        self._process = os.getpid()
        self._inbox = Inbox()
        self._stopping = threading.Event()
        self._command: bytes | None = None
        self._command_lock = threading.Lock()
        self._conversation = Conversation(
            environment,
            description,
            self._inbox,
            self._stopping,
            self._put_command,
            handover if handover is not None and handover.is_needed else None,
            clock,
        )
        self._thread = TorchThread(self._run, "bagua-reporter", self._stop)
        if environment.url is None:
            # Before our own goodbye is registered, so that the service ends after it.
            job_service(environment.service_port, environment.token)
        atexit.register(self.close, GOODBYE_SECONDS)
        self._thread.start()

    def put(self, message: Message) -> None:
        """Hand something over; never waits."""
        if self._is_forked:
            return
        self._inbox.put(message)
        if isinstance(message, Event) and message.kind in VOIDING:
            self.take_command()  # The service gave it before it knew.

    def look(self, reductions: int) -> None:
        """Command the ranks to leave a trial if the service is away, after so many reductions."""
        if not self._is_forked:
            self._conversation.absence.look(reductions)

    @property
    def has_command(self) -> bool:
        """Whether there is one that the ranks have not been told yet."""
        return self._command is not None

    def take_command(self) -> bytes | None:
        """The packed command that the ranks have not been told yet."""
        if self._is_forked:
            return None
        with self._command_lock:
            command, self._command = self._command, None
        return command

    def page(self) -> str:
        """The job's, for a browser; empty before it is registered."""
        return "" if self._is_forked else self._conversation.page

    @property
    def is_suspicious(self) -> bool:
        """Whether step times may be changing, after the tuning."""
        return self._conversation.is_suspicious

    def close(self, wait_seconds: float = 0.0) -> None:
        """The training is over: say so to the service, but never wait long for it."""
        if self._is_forked or not self._thread.is_alive():
            return
        if not self._stopping.is_set():
            if self._conversation.is_tuning:
                announce(logger, "autotune: %s; %s", ENDED_FIRST, self._conversation.remains)
            self._stopping.set()
            self.put(Event("ended", None, self._count.made, "the training process ended"))
        if not self._conversation.is_tuning:
            wait_seconds = min(wait_seconds, WATCHED_GOODBYE_SECONDS)
        self._thread.join(wait_seconds)

    def finish(self, reason: str = "") -> None:
        """The last command is in force on all ranks: the thread may end.

        Args:
            reason: told to the service, which would wait for more; empty: it knows.
        """
        if not self._is_forked:
            self._stopping.set()
            if reason:
                self.put(Event("ended", None, self._count.made, reason))
            self._inbox.wake()

    def _run(self) -> None:
        try:
            self._conversation.run()
        finally:
            atexit.unregister(self.close)  # Until now the exit waits for the goodbye.

    def _stop(self) -> None:
        """Have the thread end at once, whatever it waits for."""
        self._stopping.set()
        self._inbox.wake()
        self._conversation.cut()

    def _put_command(self, command: bytes, holds: bool) -> None:
        """Take the place of the one before. What an event that waits makes void is left out, unless
        it holds nevertheless: the service's answer to the event brings the next."""
        with self._command_lock:
            if holds or not self._inbox.has_event(VOIDING):
                self._command = command

    @property
    def _is_forked(self) -> bool:
        """Whether this process is a fork of the one that has the thread (a DataLoader's worker,
        say). Whatever lock the thread held at that moment is held in here for ever."""
        return os.getpid() != self._process

"""Rank 0's background thread: all that is said to the service, and what the service wants.

Whatever the service does, training goes on: errors are waited out here, step times that nobody
takes are dropped, and the ranks stay at the configuration they have.
"""

from __future__ import annotations

import atexit
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from bagua_client.agent.inbox import Event, Inbox, Samples, StepTable
from bagua_client.agent.sidecar import SidecarError, shared_sidecar
from bagua_client.environment import Environment
from bagua_client.service_client import (
    JobState,
    JobUnknown,
    ServiceClient,
    ServiceRefused,
    ServiceUnavailable,
)

logger = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 0.2
LAST_RETRY_SECONDS = 5.0
LATE_RETRY_SECONDS = 30.0
GOODBYE_SECONDS = 1.0
MOST_REFUSALS = 10
"""One after the other; then the service and this client do not understand each other."""
MOST_DISAGREEMENTS = 5
"""In one job; then something is wrong with its ranks, or with what the service asks of them."""


class Reporter:
    """Registers the job, reports its steps, and holds the command that the ranks run next.

    A command is JSON: ``{"trial": int or null, "configuration": {...}}``; without a trial it is
    the last one, and the configuration the one to keep.
    """

    def __init__(self, environment: Environment, description: Mapping[str, Any]) -> None:
        self._environment = environment
        self._description = description
        self._job_id = uuid.uuid4().hex
        self._inbox = Inbox()
        self._steps = StepTable(int(description["world_size"]))
        self._service: ServiceClient | None = None
        self._commanded: object = object()
        self._command: bytes | None = None
        self._command_lock = threading.Lock()
        self._stopping = threading.Event()
        self._logged_tenths = 0
        self._refusals = 0
        self._disagreements = 0
        self._thread = threading.Thread(target=self._run, name="bagua-reporter", daemon=True)
        if environment.url is None:
            # Before our own goodbye is registered, so that the service ends after it.
            shared_sidecar(environment.service_port)
        atexit.register(self.close, GOODBYE_SECONDS)
        self._thread.start()

    def put(self, message: Samples | Event) -> None:
        """Hand something over; never waits."""
        self._inbox.put(message)

    def take_command(self) -> bytes | None:
        """The command that the ranks have not been told yet."""
        with self._command_lock:
            command, self._command = self._command, None
        return command

    def close(self, wait_seconds: float = 0.0) -> None:
        """The training is over: say so to the service, but never wait long for it."""
        atexit.unregister(self.close)
        if self._thread.is_alive():
            logger.info("autotune: the training ended before its tuning did")
            self._stopping.set()
            self.put(Event("ended", None, 0, "the training process ended"))
            self._thread.join(wait_seconds)

    def finish(self) -> None:
        """The last command is in force on all ranks: the thread may end."""
        atexit.unregister(self.close)
        self._stopping.set()
        self._inbox.wake()

    def _run(self) -> None:
        try:
            state = self._call(lambda service: service.register(self._description))
            logger.info("autotune: job %s at %s", self._description["name"], self._connected().url)
            self._follow(state)
            while not self._stopping.is_set():
                message = self._inbox.take(timeout_seconds=1.0)
                if message is not None:
                    self._deliver(message)
            while (message := self._inbox.take(timeout_seconds=0.0)) is not None:
                if isinstance(message, Event):
                    self._deliver(message)
        except _Stopped:
            return
        except (ServiceRefused, SidecarError, _Hopeless) as error:
            self._give_up(str(error))
        except Exception as error:
            logger.exception("autotune: an error in the reporter")
            self._give_up(repr(error))

    def _give_up(self, reason: str) -> None:
        """No tuning in this job; the ranks go back to the configuration it would have had."""
        if self._stopping.is_set():
            return
        logger.warning("autotune is off for this job: %s", reason)
        self._order({"trial": None, "configuration": self._description["default_configuration"]})

    def _deliver(self, message: Samples | Event) -> None:
        try:
            if isinstance(message, Event):
                state = self._send_event(message)
            else:
                complete = self._steps.add(message)
                if not complete:
                    return
                steps = [{"step": step, "seconds": seconds} for step, seconds in complete]
                state = self._call(lambda service: service.observe(message.trial, steps))
            self._refusals = 0
        except ServiceRefused as error:
            self._refusals += 1
            if self._refusals == 1:
                logger.warning("autotune: the service refused a report (%s)", error)
            if self._refusals >= MOST_REFUSALS:
                raise
            state = self._call(lambda service: service.state())
        self._follow(state)

    def _send_event(self, event: Event) -> JobState:
        state = self._call(
            lambda service: service.event(
                event.kind, event.trial, event.step, event.message, event.seconds
            )
        )
        if event.kind == "disagreement":
            # The ranks are at the baseline now, whatever they were told before.
            self._commanded = object()
            self._disagreements += 1
            if self._disagreements >= MOST_DISAGREEMENTS:
                raise _Hopeless(f"the ranks disagreed too often ({event.message})")
        return state

    def _follow(self, state: JobState) -> None:
        """Tell the ranks what the service wants now, if that is new."""
        self._log_progress(state)
        if state.trial != self._commanded:
            self._order({"trial": state.trial, "configuration": dict(state.configuration)})
            self._commanded = state.trial
            if state.summary is not None:
                logger.info("autotune: %s", state.summary)

    def _order(self, command: Mapping[str, Any]) -> None:
        with self._command_lock:
            self._command = json.dumps(command).encode()

    def _log_progress(self, state: JobState) -> None:
        tenths = state.trials_measured // 10
        if state.trial is None or tenths <= self._logged_tenths:
            return
        self._logged_tenths = tenths
        faster = f", best so far {state.speedup:.2f}x" if state.speedup is not None else ""
        logger.info(
            "autotune: trial %d of at most %d%s", state.trials_measured, state.max_trials, faster
        )

    def _call(self, request: Callable[[ServiceClient], JobState]) -> JobState:
        """Make a request, again and again until it is answered.

        Raises:
            ServiceRefused: the service will never take it.
            SidecarError: there is no service and there will be none.
            _Stopped: the job ended meanwhile.
        """
        began = time.monotonic()
        failed = False
        pause_seconds = FIRST_RETRY_SECONDS
        while True:
            try:
                state = self._ask(request)
            except ServiceUnavailable as error:
                if not failed:
                    logger.warning(
                        "autotune: the service at %s cannot be used: %s. Training goes on with "
                        "the configuration it has; tuning resumes when the service is back",
                        self._service.url if self._service else "its address",
                        error,
                    )
                failed = True
                if (
                    self._stopping.wait(pause_seconds)
                    and time.monotonic() - began > GOODBYE_SECONDS
                ):
                    raise _Stopped from error
                pause_seconds = self._next_pause(pause_seconds, time.monotonic() - began)
                continue
            if failed:
                logger.info("autotune: the service is back")
            return state

    def _next_pause(self, pause_seconds: float, waited_seconds: float) -> float:
        if waited_seconds > self._environment.server_wait_seconds:
            return LATE_RETRY_SECONDS
        return min(pause_seconds * 2, LAST_RETRY_SECONDS)

    def _ask(self, request: Callable[[ServiceClient], JobState]) -> JobState:
        service = self._connected()
        try:
            return request(service)
        except JobUnknown:
            # Another database, perhaps.
            self._commanded = object()
        try:
            service.register(self._description)
            return service.state()
        except JobUnknown as error:
            raise ServiceUnavailable(f"it knows no jobs at all: {error}") from error

    def _connected(self) -> ServiceClient:
        environment = self._environment
        url = environment.url or shared_sidecar(environment.service_port).url()
        if self._service is None or self._service.url != url.rstrip("/"):
            self._service = ServiceClient(url, self._job_id, environment.token)
        return self._service


class _Stopped(Exception):
    """The job ended while the service was away."""


class _Hopeless(Exception):
    """Tuning this job leads nowhere; the message says why."""

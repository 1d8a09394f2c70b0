"""The reporter's requests to the service, repeated until they are answered; the breaker: a service
that is away is asked seldom, and the user told once; and for how long a trial bears its silence.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from bagua_client.announcement import announce, announce_page
from bagua_client.environment import Environment
from bagua_client.service.client import (
    JobState,
    JobUnknown,
    NotSupported,
    Progress,
    ServiceClient,
    ServiceDenied,
    ServiceRefused,
    ServiceUnavailable,
)
from bagua_client.service.sidecar import JobService, SidecarError, job_service

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

    Two threads meet here, without waiting: the reporter's asks the service, the training's looks
    whether it was answered. A request may hang for a minute.

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


REGISTRATIONS = 3
"""A registration that is refused so often is wrong, and not only damaged on its way."""
REFUSED_PAUSE_SECONDS = 0.5


class Stopped(Exception):
    """The job ended while the service was away."""


class Connection:
    """The connection to the service at the user's address, or to the one of this process.

    Args:
        environment: the settings.
        job_id: the job's.
        description: what the job is registered with.
        stopping: set when the job ends: from then on nothing is tried twice.
        on_forgotten: called when the service did not know the job, which is registered anew.
        absence: learns what is asked, and when that is over.
    """

    def __init__(
        self,
        environment: Environment,
        job_id: str,
        description: Mapping[str, Any],
        stopping: threading.Event,
        on_forgotten: Callable[[], None],
        absence: Absence,
    ) -> None:
        self._environment = environment
        self._job_id = job_id
        self._description = description
        self._stopping = stopping
        self._on_forgotten = on_forgotten
        self._absence = absence
        self._circuit = Circuit(environment.server_wait_seconds)
        self._service: ServiceClient | None = None
        self._endings = 0  # of our own service, as far as they are told
        self._trouble = ""  # with the latest request; empty: it was answered

    @property
    def url(self) -> str:
        """Where the service is; empty before the first request."""
        return self._service.url if self._service is not None else ""

    @property
    def page(self) -> str:
        """The job's, for a browser; only after the first request.

        The token of a service of this process's own goes with it, behind a ``#``: a browser sends
        that to nobody, and it stands in no log of requests.
        """
        token = "" if self._environment.url else self._sidecar().page_token
        return f"{self.url}/jobs/{self._job_id}" + (f"#token={token}" if token else "")

    def announce_page(self) -> None:
        """Say where the job's page is; a service that ends with the training says what then."""
        name = str(self._description["name"])
        announce_page(logger, name, self.page)
        if self._environment.url is None:
            self._sidecar().shown.append(name)

    def call(self, request: Callable[[ServiceClient], JobState]) -> JobState:
        """Make a request, again and again until it is answered.

        Raises:
            ServiceRefused: the service will never take it.
            SidecarError: there is no service and there will be none.
            Stopped: the job ended meanwhile, or has ended and is not known any more.
        """
        with self._absence.asking():
            while True:
                try:
                    state = self._ask(request)
                except ServiceUnavailable as error:
                    self._trouble = str(error)
                    if self._stopping.is_set():
                        raise Stopped from error
                    self._stopping.wait(self._circuit.failed(self._place, error))
                except ServiceRefused:
                    self._circuit.answered()  # It is there.
                    raise
                else:
                    self._circuit.answered()
                    self._trouble = ""
                    return state

    def cut(self) -> None:
        """End the request under way, from another thread."""
        if self._service is not None:
            self._service.cut()

    def close(self) -> None:
        """Close the connection, after the last request."""
        if self._service is not None:
            self._service.close()

    def renew(self, progress: Progress | None = None) -> None:
        """Say once that the training lives, and how far it is. If that fails, the next time is
        soon."""
        if self._service is not None:
            failures = JobUnknown, ServiceRefused, ServiceUnavailable, SidecarError
            with self._absence.asking(), suppress(*failures):
                self._connected().renew(progress)

    def bring(self, copy: Mapping[str, Any]) -> None:
        """Give the service what the ranks kept of earlier lives, once: it can do without.

        Raises:
            SidecarError: there is no service and there will be none.
        """
        try:
            known = self._connected().bring(copy)
        except (JobUnknown, ServiceRefused, ServiceUnavailable) as error:
            logger.info(
                "autotune: the service does not take the ranks' copy of earlier runs: %s", error
            )
        else:
            if known:
                logger.info("autotune: %d earlier runs were restored from the ranks' copy", known)

    def copy(self) -> dict[str, Any] | None:
        """Return what is known of the job, for other nodes; None: that cannot be had now."""
        if self._service is None:
            return None
        try:
            with self._absence.asking():
                return self._service.copy()
        except (JobUnknown, ServiceRefused, ServiceUnavailable):
            return None

    def register(self) -> JobState:
        """Make the job known. Raises what :meth:`call` does."""
        for _ in range(REGISTRATIONS - 1):
            try:
                return self.call(self._register)
            except ServiceRefused:
                if self._stopping.wait(REFUSED_PAUSE_SECONDS):
                    raise
        return self.call(self._register)

    @property
    def untold(self) -> str:
        """Why the service knows nothing of a job that it has not taken yet, in words."""
        why = f"could not be used: {self._trouble}" if self._trouble else "had not answered yet"
        return f"nothing is kept of it, as the service {self._place} {why}"

    @property
    def _place(self) -> str:
        if self._environment.url is None:
            return "beside rank 0"
        return f"at {self._environment.url} (BAGUA_AUTOTUNE_URL)"

    def _register(self, service: ServiceClient) -> JobState:
        try:
            return service.register(self._description)
        except (JobUnknown, NotSupported) as error:
            # The service answers this request otherwise.
            raise ServiceUnavailable(
                f"there is no such service there ({error}); set BAGUA_AUTOTUNE_URL to the address "
                "that bagua-autotune serve prints"
            ) from error

    def _ask(self, request: Callable[[ServiceClient], JobState]) -> JobState:
        service = self._connected()
        try:
            return request(service)
        except JobUnknown as error:
            if self._stopping.is_set():
                # Registered anew, it would be tuned from its beginning with nobody there.
                raise Stopped from error
            reason = str(error)
        try:
            service.state()
        except JobUnknown:
            return self._register_anew(service)
        raise ServiceRefused(f"it knows the job, but has no such request: {reason}")

    def _register_anew(self, service: ServiceClient) -> JobState:
        """Register the job again, as the service does not know it: perhaps it has another
        database.
        """
        self._on_forgotten()
        self._register(service)
        try:
            return service.state()
        except JobUnknown as error:
            raise ServiceUnavailable(
                f"it forgot the job right after it was registered: {error}"
            ) from error

    def _connected(self) -> ServiceClient:
        environment = self._environment
        url, token = environment.url, environment.token
        if url is None:
            url, token = self._sidecar().url(), self._sidecar().token
        is_first = self._service is None
        if self._service is None or self._service.url != url.rstrip("/"):
            self._service = ServiceClient(url, self._job_id, token)
        if environment.url is None:
            self._tell_restart(is_first)
        return self._service

    def _tell_restart(self, is_first: bool) -> None:
        endings = self._sidecar().endings
        if len(endings) > self._endings and not is_first:
            announce(
                logger,
                "autotune: the service that rank 0 had started %s, and was started again; "
                "nothing measured is lost. The job's page is now %s",
                endings[-1],
                self.page,
            )
        self._endings = len(endings)

    def _sidecar(self) -> JobService:
        return job_service(self._environment.service_port, self._environment.token)

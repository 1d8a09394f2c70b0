"""The reporter's requests: made again until they are answered, whatever the service does."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from bagua_client.agent.sidecar import Sidecar, shared_sidecar
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


class Stopped(Exception):
    """The job ended while the service was away."""


class Connection:
    """To the service at the user's address, or to the one of this process.

    Args:
        environment: the settings.
        job_id: the job's.
        description: what the job is registered with.
        stopping: set when the job ends: from then on nothing is tried twice.
        on_forgotten: called when the service did not know the job, which is registered anew.
    """

    def __init__(
        self,
        environment: Environment,
        job_id: str,
        description: Mapping[str, Any],
        stopping: threading.Event,
        on_forgotten: Callable[[], None],
    ) -> None:
        self._environment = environment
        self._job_id = job_id
        self._description = description
        self._stopping = stopping
        self._on_forgotten = on_forgotten
        self._service: ServiceClient | None = None

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

    def call(self, request: Callable[[ServiceClient], JobState]) -> JobState:
        """Make a request, again and again until it is answered.

        Raises:
            ServiceRefused: the service will never take it.
            SidecarError: there is no service and there will be none.
            Stopped: the job ended meanwhile, or has ended and is not known any more.
        """
        began = time.monotonic()
        failed = False
        pause_seconds = FIRST_RETRY_SECONDS
        while True:
            try:
                state = self._ask(request)
            except ServiceUnavailable as error:
                if self._stopping.is_set():
                    raise Stopped from error
                if not failed:
                    logger.warning(
                        "autotune: the service at %s cannot be used: %s. Training goes on with "
                        "the configuration it has; tuning resumes when the service is back",
                        self.url or "its address",
                        error,
                    )
                failed = True
                self._stopping.wait(pause_seconds)
                pause_seconds = self._next_pause(pause_seconds, time.monotonic() - began)
                continue
            if failed:
                logger.info("autotune: the service is back")
            return state

    def register(self) -> JobState:
        """Make the job known. Raises what :meth:`call` does."""
        return self.call(lambda service: service.register(self._description))

    def _next_pause(self, pause_seconds: float, waited_seconds: float) -> float:
        if waited_seconds > self._environment.server_wait_seconds:
            return LATE_RETRY_SECONDS
        return min(pause_seconds * 2, LAST_RETRY_SECONDS)

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
        raise ServiceRefused(f"it knows the job, but not the request: {reason}")

    def _register_anew(self, service: ServiceClient) -> JobState:
        """Another database, perhaps."""
        self._on_forgotten()
        try:
            service.register(self._description)
            return service.state()
        except JobUnknown as error:
            raise ServiceUnavailable(f"it knows no jobs at all: {error}") from error

    def _connected(self) -> ServiceClient:
        environment = self._environment
        url, token = environment.url, environment.token
        if url is None:
            url, token = self._sidecar().url(), self._sidecar().token
        if self._service is None or self._service.url != url.rstrip("/"):
            self._service = ServiceClient(url, self._job_id, token)
        return self._service

    def _sidecar(self) -> Sidecar:
        return shared_sidecar(self._environment.service_port, self._environment.token)

"""HTTP client of the service (API v2), used by the reporter thread of rank 0. The time and the size
of an answer are limited, and an error says what is wrong and what to do about it."""

from __future__ import annotations

import json
import math
import os
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import requests
from requests.adapters import HTTPAdapter
from requests.exceptions import InvalidHeader, InvalidSchema, InvalidURL, MissingSchema, SSLError
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import HTTPError, LocationParseError
from urllib3.exceptions import InvalidHeader as InvalidRetryAfter
from urllib3.util import Retry

from bagua_wire.messages import BEING_TUNED
from bagua_wire.profile import Profile

CONNECT_SECONDS = 3.0
READ_SECONDS = 60.0
"""Longest time without a byte. It may be long, because only the reporter thread waits."""
WHOLE_SECONDS = 120.0
"""Longest time for a request and its whole answer, which could otherwise come byte by byte."""
LARGEST_ANSWER_BYTES = 16 * 2**20
LONGEST_DETAIL = 500
MOST_RETRY_AFTER_SECONDS = 300.0
"""Longest wait before the next request, even if the service asks for a longer one."""


class ServiceUnavailable(Exception):
    """Raised where there is no usable answer now; there may be one later.

    Attributes:
        retry_after_seconds: how long the service asks the client to wait.
    """

    def __init__(self, reason: str, retry_after_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_seconds = retry_after_seconds


class ServiceDenied(ServiceUnavailable):
    """Raised where no usable answer comes until somebody changes a setting of client or service."""


class JobUnknown(Exception):
    """The service knows no such job (perhaps its database is another one), or no such request."""


class ServiceRefused(Exception):
    """The service does not accept this request, now or later."""


class NotSupported(ServiceRefused):
    """What answers there takes no request of this kind: it is another server, perhaps."""


class Transport:
    """The connection to one service. Only one thread may use it at a time.

    Args:
        token: the token that the service requires; None: it requires none.
    """

    def __init__(self, token: str | None) -> None:
        self._session = requests.Session()
        self._adapter = _Adapter()
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, self._adapter)
        # Ignore the environment's proxy: it cannot reach a service that runs beside the job.
        self._session.trust_env = False
        # But do read the CA file: the cluster's own authority may have signed the certificate.
        self._session.verify = os.environ.get("REQUESTS_CA_BUNDLE") or True
        self._has_token = token is not None
        if token is not None:
            self._session.headers["Authorization"] = f"Bearer {token}"

    def send(self, method: str, url: str, body: Mapping[str, Any] | None) -> Any:
        """Send a request and return the JSON document of the answer.

        Raises:
            ServiceUnavailable: no connection, no answer in time, a server error, or no JSON.
            ServiceDenied: the service requires another token, or another address.
            JobUnknown: there is nothing at ``url``.
            ServiceRefused: the service says that the request is wrong, or it cannot be sent.
            NotSupported: what answers takes no requests of this kind.
        """
        timeouts = CONNECT_SECONDS, READ_SECONDS
        try:
            # No redirects: a POST would become a GET, whose answer looks as if the POST succeeded.
            with (
                self._adapter.limited(WHOLE_SECONDS),
                self._session.request(
                    method, url, json=body, timeout=timeouts, stream=True, allow_redirects=False
                ) as response,
            ):
                content = b"".join(_read(response))
        except (InvalidURL, InvalidSchema, MissingSchema, LocationParseError) as error:
            raise ServiceRefused("BAGUA_AUTOTUNE_URL must be like http://host:8123") from error
        except (InvalidHeader, UnicodeError) as error:
            raise ServiceRefused(
                "BAGUA_AUTOTUNE_TOKEN must consist of letters and digits"
            ) from error
        except SSLError as error:
            raise _untrusted(error) from error
        except (requests.RequestException, HTTPError, OSError) as error:
            raise ServiceUnavailable(_reason(error)) from error
        self._check(response, content)
        return _document(content)

    def cut(self) -> None:
        """End the request under way, from another thread."""
        self._adapter.cut()

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        self._session.close()

    def _check(self, response: requests.Response, content: bytes) -> None:
        status = response.status_code
        if status < 300:
            return
        said = _detail(response, content)
        if status == 404:
            raise JobUnknown(said)
        if status == 405:
            raise NotSupported(said)
        if status == 401:
            wrong = "it does not accept this token" if self._has_token else "it needs a token"
            raise ServiceDenied(
                f"{wrong} ({said}); set BAGUA_AUTOTUNE_TOKEN to that of the service"
            )
        if status == 403:
            raise ServiceDenied(f"it refuses this process ({said})")
        if 300 <= status < 400:
            target = response.headers.get("Location", "somewhere else")
            raise ServiceDenied(f"it redirects to {target}; set BAGUA_AUTOTUNE_URL to that address")
        if status >= 500 or status in (408, 429):
            raise ServiceUnavailable(f"it answered {status}: {said}", _retry_after(response))
        raise ServiceRefused(said)


class _Adapter(HTTPAdapter):
    """The adapter of requests, which can also shut down the connection that it opened last."""

    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        super().init_poolmanager(*args, **options)
        self._sockets: list[socket.socket] = []
        self.poolmanager.pool_classes_by_scheme = {
            "http": _remembering(HTTPConnectionPool, self._sockets),
            "https": _remembering(HTTPSConnectionPool, self._sockets),
        }

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """Limit the time spent in this context. A socket's own timeout restarts with each byte."""
        watchdog = threading.Timer(seconds, self.cut)
        watchdog.daemon = True
        watchdog.start()
        try:
            yield
        finally:
            watchdog.cancel()

    def cut(self) -> None:
        """Shut it down, from any thread."""
        for sock in self._sockets:
            with suppress(OSError):  # The socket is already closed.
                sock.shutdown(socket.SHUT_RDWR)


def _remembering(pool: type[HTTPConnectionPool], sockets: list[socket.socket]) -> type[Any]:
    """A subclass of ``pool`` that keeps its newest connection's socket in ``sockets``."""

    class Remembered(pool.ConnectionCls):  # type: ignore[name-defined, misc]
        def connect(self) -> None:
            super().connect()
            sockets[:] = [self.sock]

    return type(pool.__name__, (pool,), {"ConnectionCls": Remembered})


def _read(response: requests.Response) -> Iterator[bytes]:
    """Yields the body in pieces; raises ServiceUnavailable if it is too large."""
    size = 0
    for piece in response.iter_content(65536):
        size += len(piece)
        if size > LARGEST_ANSWER_BYTES:
            raise ServiceUnavailable("its answer is too large")
        yield piece


def _document(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        what = "a web page" if content.lstrip()[:1] == b"<" else "not JSON"
        raise ServiceUnavailable(
            f"its answer is {what}; perhaps another program listens there"
        ) from error


def _detail(response: requests.Response, content: bytes) -> str:
    try:
        return str(json.loads(content)["detail"])[:LONGEST_DETAIL]
    except (ValueError, RecursionError, KeyError, TypeError):
        return f"{response.status_code} {response.reason}"


def _retry_after(response: requests.Response) -> float:
    """Seconds from the Retry-After header, which gives seconds or a date (RFC 9110, 10.2.3)."""
    try:
        seconds = Retry().parse_retry_after(response.headers.get("Retry-After", "0"))
    except (InvalidRetryAfter, ValueError, OverflowError):
        return 0.0
    return min(max(seconds, 0.0), MOST_RETRY_AFTER_SECONDS)


def _untrusted(error: SSLError) -> ServiceDenied:
    causes = _causes(error)
    if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes):
        return ServiceDenied(
            "this machine does not trust its certificate; REQUESTS_CA_BUNDLE may name a file with "
            "the authority that signed it"
        )
    return ServiceDenied("it does not use https; try http://")


def _reason(error: Exception) -> str:
    causes = _causes(error)
    if any(isinstance(cause, socket.gaierror) for cause in causes):
        return "there is no host with that name"
    if any(isinstance(cause, ConnectionRefusedError) for cause in causes):
        return "nothing listens there"
    if isinstance(error, requests.Timeout):
        return "no answer in time"
    return "the connection broke off" if isinstance(error, OSError) else "no connection"


def _causes(error: BaseException) -> list[BaseException]:
    """The error and the errors that caused it, the original cause last."""
    found: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in found:
        found.append(at)
        at = at.__cause__ or at.__context__
    return found


RESULT_NUMBERS = {
    **dict.fromkeys(("speedup", "low", "high", "seconds", "cost_steps", "cost_seconds"), float),
    **dict.fromkeys(("trials", "steps", "payback_steps"), int),
    **dict.fromkeys(("default_peak_bytes", "peak_bytes", "device_bytes"), int),
}


@dataclass(frozen=True)
class JobState:
    """What the service wants the ranks to run.

    Attributes:
        trial: the trial to run; None: tuning has ended, or the next trial is being chosen.
        configuration: the configuration that all ranks should run now, by knob.
        trials_measured: number of trials measured so far.
        max_trials: maximum number of trials before the best and the default are measured again.
        speedup: speed-up of the best trial so far over the default; None: not known yet.
        summary: the result in one line; None: tuning has not ended.
        deciding: whether the next trial is being chosen, with the last one still open or with no
            open trial; ask again soon.
        round: number of the tuning: 0 is the first; another one follows a lasting change.
        incumbent: the best configuration so far; None: not known.
        result: the known numbers of the result, by their names in RESULT_NUMBERS.
    """

    trial: int | None
    configuration: Mapping[str, Any]
    trials_measured: int
    max_trials: int
    speedup: float | None
    summary: str | None
    deciding: bool = False
    round: int = 0
    incumbent: Mapping[str, Any] | None = None
    result: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_json(cls, document: Any) -> JobState:
        """Read the service's answer.

        Raises:
            ServiceUnavailable: the document is not the state of a job.
        """
        try:
            trial, progress, result = document["trial"], document["progress"], document["result"]
            state = cls(
                trial=None if trial is None else int(trial["index"]),
                configuration=dict(document["configuration"]),
                trials_measured=int(progress["trials_measured"]),
                max_trials=int(progress["max_trials"]),
                speedup=_numbers(progress).get("speedup"),
                summary=None if result is None else str(result["summary"]),
                deciding=bool(document["deciding"])
                or (trial is None and document.get("state") in BEING_TUNED),
                round=int(document["round"]),
                incumbent=dict(found) if (found := progress.get("incumbent")) else None,
                result=_numbers(result or {}),
            )
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise ServiceUnavailable(f"its answer is not the state of a job ({error!r})") from error
        return state


def _numbers(result: Mapping[str, Any]) -> dict[str, float]:
    """The known numbers of the result."""
    said = {name: result[name] for name in RESULT_NUMBERS if result.get(name) is not None}
    return {name: RESULT_NUMBERS[name](said[name]) for name in said if math.isfinite(said[name])}


class StepTimes(NamedTuple):
    """The times of one step on all ranks.

    Attributes:
        step: the step's number.
        seconds: duration of the step on each rank.
        compute_seconds: how long each rank computed in it; None: not known for all ranks.
        complexity: of the largest batch of a rank; None: not known for all ranks.
    """

    step: int
    seconds: Sequence[float]
    compute_seconds: Sequence[float] | None = None
    complexity: float | None = None


class Progress(NamedTuple):
    """How far the training of a tuned job has got.

    Attributes:
        step: number of the last step.
        seconds: median duration of the latest steps; a step takes as long as its slowest rank.
    """

    step: int
    seconds: float


class ServiceClient:
    """One job at one service.

    All methods except :meth:`copy` and :meth:`bring` return the job's state. All raise the errors
    of :meth:`Transport.send`; JobUnknown means that the job is not (or no longer) registered, or
    that the service has no such request.
    """

    def __init__(self, url: str, job_id: str, token: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._copies_url = f"{self.url}/api/v2/copies"
        self._job_url = f"{self.url}/api/v2/jobs/{job_id}"
        self._transport = Transport(token)
        self.cut, self.close = self._transport.cut, self._transport.close

    def register(self, description: Mapping[str, Any]) -> JobState:
        return self._send("PUT", self._job_url, description)

    def state(self) -> JobState:
        return self._send("GET", f"{self._job_url}/state", None)

    def copy(self) -> dict[str, Any]:
        """Return what the service knows of the job, to be given to the service of another host."""
        copy = self._transport.send("GET", f"{self._job_url}/copy", None)
        if not isinstance(copy, dict):
            raise ServiceUnavailable("its answer is no copy of a job")
        return copy

    def bring(self, copy: Mapping[str, Any]) -> int:
        """Give the service a copy from another host's. Returns how many jobs were new to it."""
        answer = self._transport.send("POST", self._copies_url, copy)
        adopted = answer.get("jobs") if isinstance(answer, dict) else None
        return adopted if isinstance(adopted, int) else 0

    def observe(
        self, trial: int, steps: Sequence[StepTimes], memory: Mapping[str, Any] | None = None
    ) -> JobState:
        known = [{k: v for k, v in step._asdict().items() if v is not None} for step in steps]
        body = {"trial": trial, "steps": known, **({} if memory is None else {"memory": memory})}
        return self._send("POST", f"{self._job_url}/observations", body)

    def renew(self, progress: Progress | None = None) -> JobState:
        """Report that the training is running and, now and then once it is tuned, its progress."""
        if progress is None:
            return self.observe(0, [])
        return self._send("POST", f"{self._job_url}/progress", progress._asdict())

    def profile(self, trial: int, profile: Profile) -> JobState:
        body = {"trial": trial, **asdict(profile)}
        return self._send("POST", f"{self._job_url}/profiles", body)

    def event(
        self,
        kind: str,
        trial: int | None,
        step: int,
        message: str,
        seconds: float | None,
        memory: Mapping[str, Any] | None = None,
    ) -> JobState:
        body: dict[str, Any] = {"kind": kind, "trial": trial, "step": step, "message": message}
        body["seconds"] = seconds
        if memory is not None:
            body["memory"] = memory
        return self._send("POST", f"{self._job_url}/events", body)

    def _send(self, method: str, url: str, body: Mapping[str, Any] | None) -> JobState:
        return JobState.from_json(self._transport.send(method, url, body))

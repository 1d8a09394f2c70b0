"""A service that is killed, restarted, frozen and cut off, behind a proxy.

The proxy treats every tenth request badly, and remembers what was acknowledged.
"""

from __future__ import annotations

import http.client
import json
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from benchmarks.testbed.job import free_port
from tests.autotune.server import ServeProcess

EVERY = 10
FAULTS = ("drop", "lose", "delay", "duplicate", "repeat late", "garble", "garble answer", "half")
LONGEST_DELAY_SECONDS = 2.0
PATIENCE_SECONDS = 30.0  # with a service that is frozen
HANG_SECONDS = 1.0  # of a connection that is cut off
TROUBLES = ("kill", "restart", "freeze", "cut off")
QUIET_SECONDS = 2.0, 6.0
QUIET_STARTS = 2.0
"""After so many times what a start takes: on a slow machine the service would only be started."""
TROUBLE_SECONDS = 0.5, 3.0


class Report(NamedTuple):
    """What the service took and its client knows to be taken."""

    job_id: str
    kind: str
    body: dict[str, Any]


class FaultyProxy:
    """Context manager: passes requests on to the service, well or badly.

    Args:
        service_port: on this machine.
        seed: decides which fault comes when, by the order in which requests come.
        every: so many requests one has a fault.

    Attributes:
        is_cut: while set nothing is passed on; connections hang and then break.
        faults: how often each was made.
        acknowledged: reports whose answers were handed over whole.
    """

    def __init__(self, service_port: int, seed: int, every: int = EVERY) -> None:
        self.is_cut = threading.Event()
        self.faults: Counter[str] = Counter()
        self.acknowledged: list[Report] = []
        self.requests = 0
        self._service_port = service_port
        self._every = every
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FaultyProxy:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def next_fault(self) -> tuple[str, float]:
        """Of the next request, and a number below 1 to carry it out with; mostly none."""
        with self._lock:
            self.requests += 1
            if self.requests % self._every:
                return "", 0.0
            fault, number = self._random.choice(FAULTS), self._random.random()
            self.faults[fault] += 1
            return fault, number

    def acknowledge(self, path: str, body: bytes) -> None:
        """The answer was handed over."""
        _, _, rest = path.partition("/jobs/")
        job_id, _, kind = rest.partition("/")
        if kind in ("observations", "events"):
            with self._lock:
                self.acknowledged.append(Report(job_id, kind, json.loads(body)))

    def pass_on(self, request: _Request) -> tuple[int, Sequence[tuple[str, str]], bytes]:
        """Status, headers and body of the service's answer. Raises OSError, HTTPException."""
        service = http.client.HTTPConnection(
            "127.0.0.1", self._service_port, timeout=PATIENCE_SECONDS
        )
        try:
            service.request(request.method, request.path, request.body, request.headers)
            response = service.getresponse()
            return response.status, response.getheaders(), response.read()
        finally:
            service.close()


class _Request(NamedTuple):
    method: str
    path: str
    body: bytes
    headers: dict[str, str]


class _Server(ThreadingHTTPServer):
    daemon_threads, block_on_close = True, False

    def handle_error(self, *_: object) -> None:
        pass  # A client that went away; whatever else is wrong shows in the books.


class _Broken(Exception):
    """The connection to the client is to break off."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FaultyProxy

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {k: v for k, v in self.headers.items() if k.lower() not in _OWN_HEADERS}
        try:
            self._answer(_Request(self.command, self.path, body, headers))
        except (_Broken, OSError):
            self.close_connection = True

    do_POST = do_GET = do_PUT

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, request: _Request) -> None:
        fault, number = self.proxy.next_fault()
        if self.proxy.is_cut.is_set():
            time.sleep(HANG_SECONDS)
            raise _Broken
        if fault == "drop":
            raise _Broken
        if fault == "delay":
            time.sleep(number * LONGEST_DELAY_SECONDS)
        sent = request._replace(body=_garbled(request.body)) if fault == "garble" else request
        try:
            status, headers, content = self.proxy.pass_on(sent)
            if fault == "duplicate":
                status, headers, content = self.proxy.pass_on(sent)
        except (OSError, http.client.HTTPException):
            status, headers, content = 502, [], b'{"detail": "no service behind this proxy"}'
        if fault == "repeat late":
            threading.Timer(number * LONGEST_DELAY_SECONDS, self._repeat, [request]).start()
        self._hand_over(fault, status, headers, content)
        if fault not in ("lose", "garble", "garble answer", "half") and status < 300:
            self.proxy.acknowledge(request.path, request.body)

    def _repeat(self, request: _Request) -> None:
        with suppress(OSError, http.client.HTTPException):  # nobody waits for it
            self.proxy.pass_on(request)

    def _hand_over(
        self, fault: str, status: int, headers: Sequence[tuple[str, str]], content: bytes
    ) -> None:
        if fault == "lose":
            raise _Broken
        if fault == "garble answer":
            content = _garbled(content)
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in _OWN_HEADERS:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if fault == "half" else content)
        if fault == "half":
            raise _Broken


_OWN_HEADERS = {"content-length", "connection", "transfer-encoding", "date", "server", "host"}


def _garbled(body: bytes) -> bytes:
    """With bytes in its middle that no JSON has: damage that is seen."""
    middle = len(body) // 2
    return body[:middle] + b"\x00\xff\xfe" + body[middle + 3 :]


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

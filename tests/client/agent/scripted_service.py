"""A service that follows a script: real HTTP, but trials that end when the test wants."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, TypeVar
from unittest import mock

Configuration = dict[str, Any]


def tuned_at(url: str, **more: str) -> AbstractContextManager[Any]:
    """Models that are made in this context are tuned by the service there.

    Args:
        more: other variables; the names without ``BAGUA_AUTOTUNE_``.
    """
    variables = {f"BAGUA_AUTOTUNE_{name}": text for name, text in {"URL": url, **more}.items()}
    return mock.patch.dict(os.environ, {"BAGUA_AUTOTUNE": "1", **variables})


Own = TypeVar("Own", bound="ScriptedService")

RESULT = {
    "summary": "the result",
    "speedup": 1.3,
    "low": 1.2,
    "high": 1.4,
    "trials": 2,
    "steps": 6,
    "seconds": 0.5,
    "cost_steps": 3.5,
    "cost_seconds": 0.25,
    "payback_steps": 15,
}


class _Script:
    """What one job is told."""

    def __init__(
        self,
        rounds: Sequence[Sequence[Configuration]],
        steps: int,
        deciding: int,
        closes: bool,
        is_ahead: bool,
    ) -> None:
        self._rounds = [list(configurations) for configurations in rounds]
        self._configurations = self._rounds.pop(0)
        self._steps = steps
        self._deciding_answers = deciding
        self._closes, self._is_ahead = closes, is_ahead
        self._deciding = 0
        self._round = 0
        self._is_over = False
        self._first = 0
        self._trial = 0
        self._measured: set[int] = set()
        self._default: Configuration = {}
        self._gave_up = False

    def answer(self, kind: str, body: Any) -> dict[str, Any]:
        if kind == "observations" and body["trial"] == self._trial:
            self._measured |= {step["step"] for step in body["steps"]}
            if len(self._measured) >= self._steps:
                self._trial, self._measured = self._trial + 1, set()
                self._deciding = self._deciding_answers
        elif self._deciding:
            self._deciding -= 1
        if self._is_ahead and kind == "switched" and body["trial"] == self._trial:
            self._trial += 1
        gives_up = kind in ("diverged", "infeasible", "disagreement")
        if gives_up and body["trial"] == self._trial:
            self._trial, self._measured = self._trial + 1, set()
        if kind == "PUT":
            self._default = body["default_configuration"]
        self._gave_up |= kind == "diverged" and body["trial"] is None
        self._is_over |= kind == "ended"
        if kind == "drift" and self._rounds:
            self._first, self._configurations = self._trial, self._rounds.pop(0)
            self._round += 1
        return self._state()

    def _state(self) -> dict[str, Any]:
        trial = self._trial - 1 if self._deciding else self._trial
        place = trial - self._first
        ended = self._is_over or place >= len(self._configurations)
        configuration = self._configurations[-1 if ended else place]
        if ended and self._gave_up:
            configuration = self._default
        has_result = self._round > 0 or (ended and not self._is_over)
        return {
            "trial": None if ended or (self._deciding and self._closes) else {"index": trial},
            "state": "finished" if ended else "tuning",
            "configuration": configuration,
            "progress": {
                "trials_measured": place,
                "max_trials": 60,
                "speedup": 1.25,
                "incumbent": self._configurations[0] if place else None,
            },
            "round": self._round,
            "result": RESULT if has_result else None,
            "deciding": self._deciding > 0 and not self._closes,
        }


class ScriptedService:
    """Context manager; lets each trial of each job measure so many steps, then comes the next.

    Args:
        rounds: for each round the configurations to try; a drift opens the next, if there is one.
            One that harms the training, does not fit, or that the ranks cannot agree on, gives way
            to the next; one that was kept and does harm, to the default.
        steps: a trial ends when it has this many.
        deciding: so many answers after a trial's end say that the next one is being chosen.
        closes: they say so by having no trial while the job is being tuned.
        is_ahead: a trial ends at once, as the next one is known; its steps are told nevertheless.
        refuses: kinds of requests that are answered with this status.
        port: 0: one that is free.

    A request's kind is the event's, else the last part of its path, else its method.

    Attributes:
        requests: kind and body of those that were taken.
        refused: how many were not.
    """

    def __init__(
        self,
        rounds: Sequence[Sequence[Configuration]],
        steps: int = 3,
        deciding: int = 0,
        closes: bool = False,
        is_ahead: bool = False,
        refuses: dict[str, int] | None = None,
        port: int = 0,
    ) -> None:
        self._new_script = partial(_Script, rounds, steps, deciding, closes, is_ahead)
        self._scripts: dict[str, _Script] = {}
        self._lock = threading.Lock()
        self.refuses = refuses or {}
        self.refused = 0
        self.requests: list[tuple[str, Any]] = []
        self._server = self.listen(port)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def listen(self, port: int) -> ThreadingHTTPServer:
        """A server of this service."""
        handler = type("Handler", (_Handler,), {"service": self})
        return _Server(("127.0.0.1", port), handler)

    def __enter__(self: Own) -> Own:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def bodies(self, kind: str) -> list[Any]:
        """Of the requests of that kind that were taken."""
        with self._lock:
            return [body for found, body in self.requests if found == kind]

    def forget(self) -> None:
        """Know no job any more."""
        with self._lock:
            self._scripts.clear()

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """Status, and a document or bytes; status 0: the connection is closed instead."""
        job, *rest = path.removeprefix("/api/v2/jobs/").split("/")
        kind = body["kind"] if rest == ["events"] else rest[0] if rest else method
        return self.take(kind, job, body)

    def take(self, kind: str, job: str, body: Any) -> tuple[int, Any]:
        """Answer a request of this kind."""
        with self._lock:
            if kind in self.refuses:
                self.refused += 1
                return self.refuses[kind], {"detail": "not here"}
            if kind == "PUT":
                self._scripts.setdefault(job, self._new_script())
            if job not in self._scripts:
                self.refused += 1
                return 404, {"detail": "there is no such job"}
            self.requests.append((kind, body))
            return 200, self._scripts[job].answer(kind, body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        # A test can hold the port while nothing listens there.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        super().server_bind()


class _Handler(BaseHTTPRequestHandler):
    service: ScriptedService

    def do_PUT(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null")
        status, answer = self.service.answer(self.command, self.path, body)
        if not status:
            return
        text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        with suppress(ConnectionError):  # who asked may be gone
            self.end_headers()
            self.wfile.write(text)

    do_POST = do_GET = do_PUT

    def log_message(self, *_: object) -> None:
        pass

"""The two places that the commands read: a database, or a service that runs."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bagua_autotune.cli import main
from bagua_autotune.model.job import Event, Observation
from bagua_autotune.store import Store
from bagua_autotune.tuning.tuner import Tuner
from tests.autotune.support import Ranks, make_spec

TOKEN = "a-secret"


def run(*arguments: str, answer: str | None = None) -> Result:
    """A command of this process, and what is typed."""
    return CliRunner().invoke(main, arguments, input=answer)


@pytest.fixture(params=["database", "service"])
def source(
    request: pytest.FixtureRequest, database: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Options that name the place; the module has both as fixtures, the service with the token."""
    if request.param == "database":
        return ["--database", f"sqlite:///{database}"]
    monkeypatch.setenv("BAGUA_AUTOTUNE_TOKEN", TOKEN)
    return ["--url", request.getfixturevalue("service")]


JOB = "job"
SLOW_RANK = 2


class DrivenJob:
    """Registers a job of four ranks, one of which computes longest.

    Args:
        database: file of the SQLite database.
        name: the job's.
    """

    def __init__(self, database: Path, name: str = "digits") -> None:
        self._tuner = Tuner(Store(f"sqlite:///{database}"))
        self._ranks = Ranks(noise=0.001)
        self._tuner.register(JOB, make_spec(name=name))

    def run(self, until_trial: int = 1000) -> None:
        """Measure the trials before that one, or until the job is tuned."""
        while (trial := self._tuner.open_trial(JOB)) and trial.index < until_trial:
            steps = self._ranks.run(trial.configuration, 10)
            observations = [
                Observation(step, tuple(seconds), tuple(_computing(seconds)))
                for step, seconds in steps
            ]
            self._tuner.observe(JOB, trial.index, observations)

    def end(self) -> None:
        self._tuner.take_event(JOB, Event("ended"))

    def close(self) -> None:
        self._tuner.store.close()


def _computing(seconds: Sequence[float]) -> list[float]:
    return [(0.8 if rank == SLOW_RANK else 0.5) * value for rank, value in enumerate(seconds)]


UNKNOWN = {"detail": "The requested URL was not found on the server."}


class CannedService:
    """Context manager; answers any request below ``/api/v2`` whose path it knows, others with 404.

    Args:
        answers: by path; JSON, or the bytes that are sent. May be changed at any time.
        cut_off: say that each answer is longer than it is, and end the connection.
    """

    def __init__(self, answers: Mapping[str, Any], cut_off: bool = False) -> None:
        self.answers = dict(answers)
        self.cut_off = cut_off
        self.asked: list[str] = []
        """Paths."""
        handler = type("Handler", (_Handler,), {"service": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> CannedService:
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


class _Handler(BaseHTTPRequestHandler):
    service: CannedService

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].removeprefix("/api/v2")
        self.service.asked.append(path)
        answer = self.service.answers.get(path, UNKNOWN)
        text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(404 if answer is UNKNOWN else 200)
        self.send_header("Content-Length", str(len(text) + 1000 * self.service.cut_off))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass

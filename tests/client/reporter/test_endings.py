"""However a training ends or multiplies: no hang, no error of ours, no other exit status."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.client.agent.scripted_service import ScriptedService
from tests.client.reporter.endings import KINDS

STATUSES = {"exception": 1, "sys.exit": 3, "os._exit": 4, "SIGTERM": -signal.SIGTERM}
LONGEST_SECONDS = 30.0  # on a machine that does much else; the goodbye itself waits for one


class _Silent(ScriptedService):
    """Registers a job, and then takes every request without ever answering it."""

    def __init__(self) -> None:
        super().__init__([[{"bucket_bytes": 1024}]])
        self.is_over = threading.Event()

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if method != "PUT":
            self.is_over.wait()
        return super().answer(method, path, body)


@contextmanager
def _away() -> Iterator[ScriptedService]:
    with ScriptedService([[{"bucket_bytes": 1024}]]) as service:
        service.refuses["PUT"] = 503
        yield service


@contextmanager
def _silent() -> Iterator[ScriptedService]:
    with _Silent() as service:
        yield service
        service.is_over.set()


@pytest.mark.parametrize(("serving", "kinds"), [(_silent, list(KINDS)), (_away, ["exception"])])
@pytest.mark.slow
def test_a_training_ends_as_it_would_without_us(
    serving: Any, kinds: list[str], tmp_path: Path
) -> None:
    with serving() as service:
        command = [sys.executable, "-m", "tests.client.reporter.endings", tmp_path, service.url]
        run = subprocess.run([*command, *kinds], capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert list(found) == kinds
    for kind, (status, seconds, wrote) in found.items():
        assert status == STATUSES.get(kind, 0), (kind, status, wrote)
        assert seconds < LONGEST_SECONDS, (kind, seconds)
        errors = [line for line in wrote.splitlines() if line.startswith("Traceback")]
        assert len(errors) == (kind == "exception"), wrote
        assert "Exception ignored" not in wrote, wrote

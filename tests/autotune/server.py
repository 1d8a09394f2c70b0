"""The service as it is deployed: in a process of its own, or in a thread of the tests'."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import requests
import waitress
from flask import Flask

from bagua_autotune.connections import MOST_CONNECTIONS, Server
from tests.autotune.support import Ranks, registration

PATIENCE_SECONDS = 60
LISTENING = re.compile(r"listening on (http://\S+:\d+)")


class ServeProcess:
    """Context manager: the service on a free port until the block ends.

    Args:
        database: file of the SQLite database.
        arguments: further ones of ``serve``.
        files: how many it may have open at most; None: as many as the tests.
        environment: further variables.
    """

    def __init__(
        self, database: Path, *arguments: str, files: int | None = None, **environment: str
    ) -> None:
        self._log = database.with_suffix(".log").open("a+")
        limited = [] if files is None else ["prlimit", f"--nofile={files}"]
        command = [*limited, sys.executable, "-m", "bagua_autotune", "serve", "--port", "0"]
        self.process = subprocess.Popen(
            [*command, "--database", f"sqlite:///{database}", *arguments],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=database.parent,
            env={**os.environ, **environment},
        )

    def __enter__(self) -> ServeProcess:
        assert self.process.stdout
        found = LISTENING.match(self.process.stdout.readline())
        assert found, self.log()
        self.url = found[1]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        self._log.close()

    def log(self) -> str:
        """What the service wrote to its standard error so far."""
        self._log.seek(0)
        return self._log.read()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send the signal; returns the exit status."""
        self.process.send_signal(number)
        return self.process.wait(60)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()


def tuning(
    url: str, job_id: str, ranks: Ranks, steps: int = 10, **changes: Any
) -> Iterator[dict[str, Any]]:
    """What the service says of a job at its registration and after each report, until it is
    tuned."""
    job = f"{url}/api/v2/jobs/{job_id}"
    body = registration(**changes)
    state = requests.put(job, json=body, timeout=PATIENCE_SECONDS).json()
    while True:
        yield state
        if state["state"] == "finished":
            return
        trial = state["trial"]
        made = ranks.run(state["configuration"], steps) if trial else []
        told = [{"step": step, "seconds": seconds} for step, seconds in made]
        batch = {"trial": trial["index"] if trial else 0, "steps": told}
        answer = requests.post(f"{job}/observations", json=batch, timeout=PATIENCE_SECONDS)
        assert answer.ok, answer.text
        state = answer.json()


@contextmanager
def serving_here(app: Flask, connections: int = MOST_CONNECTIONS) -> Iterator[str]:
    """The application's address, served in a thread of this process, where it can be patched."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = Server(app, listener, connections)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        # Woken by something else, the server may close the trigger before this pulls it.
        with suppress(OSError):
            server.trigger.pull_trigger(lambda: waitress.wasyncore.close_all(server._map))
        server.task_dispatcher.shutdown()
        thread.join(60)

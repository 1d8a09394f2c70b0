"""A real service in a process of its own that a test can kill and start again."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import requests

from tests.autotune.server import ServeProcess

PORTS = 15_000, 30_000
"""Below Linux's net.ipv4.ip_local_port_range."""


def unused_port() -> int:
    """Of those that the kernel gives nobody by itself: one that it gave might be another's as soon
    as it is free."""
    while True:
        port = random.SystemRandom().randrange(*PORTS)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


class ServiceProcess:
    """``bagua-autotune serve`` on one port and one database, whatever happens to it."""

    def __init__(self, folder: Path) -> None:
        self.port = unused_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._database = folder / "service.db"
        self._process: ServeProcess | None = None

    def start(self) -> None:
        """Returns when it listens."""
        self._process = ServeProcess(self._database, "--port", str(self.port)).__enter__()

    def kill(self) -> None:
        """Without giving it a chance to clean up."""
        if self._process is not None:
            self._process.__exit__(None, None, None)
            self._process = None

    def get(self, path: str) -> Any:
        response = requests.get(f"{self.url}/api/v2/{path}", timeout=30)
        response.raise_for_status()
        return response.json()

    def job(self) -> dict[str, Any]:
        """The only job there is; empty while there is none."""
        jobs = self.get("jobs")["jobs"]
        assert len(jobs) <= 1
        return dict(jobs[0]) if jobs else {}

    def profiles(self) -> list[dict[str, Any]]:
        return list(self.get(f"jobs/{self.job()['id']}/profiles")["profiles"])

    def trials(self) -> list[dict[str, Any]]:
        return list(self.get(f"jobs/{self.job()['id']}/trials")["trials"])

"""A real service in a process of its own that a test can kill and start again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import requests


class ServiceProcess:
    """``bagua-autotune serve`` on one port and one database, whatever happens to it."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.database = f"sqlite:///{folder}/service.db"
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Returns when it listens."""
        command = [sys.executable, "-m", "bagua_autotune", "serve", "--port", str(self.port)]
        command += ["--database", self.database, "--log-level", "warning"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert "listening on" in self._process.stdout.readline()

    def kill(self) -> None:
        """Without giving it a chance to clean up."""
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
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

    def trials(self) -> list[dict[str, Any]]:
        return list(self.get(f"jobs/{self.job()['id']}/trials")["trials"])

"""A real ``bagua-autotune serve`` in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

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

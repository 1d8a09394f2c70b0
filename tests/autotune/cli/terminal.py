"""A command on a real pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from types import TracebackType

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class Terminal:
    """Context manager: ``bagua-autotune`` on a terminal of 24 lines and 80 columns."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        variables = {**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "utf-8", **environment}
        for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
            variables.pop(name, None)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bagua_autotune", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=variables,
            # So that Ctrl-C of this terminal reaches it.
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self.raw = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)

    @property
    def text(self) -> str:
        """All that was ever drawn, without control codes."""
        return CONTROL.sub("", self.raw)

    def wait_for(self, pattern: str, timeout_seconds: float = 60) -> None:
        """Read until what is new since the last call matches; the time is to find a hang."""
        seen = len(self.text)
        deadline = time.monotonic() + timeout_seconds
        while not re.search(pattern, self.text[seen:], re.DOTALL):
            assert time.monotonic() < deadline, f"no {pattern!r} at the end of {self.text[-999:]!r}"
            assert self._read(), f"ended without {pattern!r}: {self.text[-999:]!r}"

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def exit_status(self) -> int:
        """Read to the end."""
        while self._read():
            pass
        return self._process.wait(60)

    def _read(self) -> bool:
        """Whether there may be more."""
        if not select.select([self._master], [], [], 0.2)[0]:
            return True
        try:
            found = os.read(self._master, 65536)
        except OSError:  # Linux says that the other end is closed.
            return False
        self.raw += found.decode(errors="replace")
        return bool(found)

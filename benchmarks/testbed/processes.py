"""What a started process says, and its end; neither is waited for without limit."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Sequence

START_SECONDS = 30.0
TERMINATE_SECONDS = 3.0


class ProcessError(Exception):
    """A process ended, or was killed, before it said what it was to say.

    The text begins with a verb, such as ``ended with exit code 1: no such file``; what it wrote
    to a piped stderr is in it.
    """


def read_line(
    process: subprocess.Popen[bytes], timeout_seconds: float | None = START_SECONDS
) -> str:
    """The next line of its piped stdout.

    Args:
        timeout_seconds: then it is killed; None: it is trusted to speak or end.

    Raises:
        ProcessError: there was none; the process is gone.
    """
    assert process.stdout is not None
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            left = None if deadline is None else max(deadline - time.monotonic(), 0)
            if not selector.select(left):
                raise ProcessError(f"said nothing for {timeout_seconds:g} s{_killed(process)}")
            # One at a time: what follows the line stays in the pipe.
            byte = os.read(process.stdout.fileno(), 1)
            if not byte:
                reason = _killed(process)
                raise ProcessError(f"ended with exit code {process.returncode}{reason}")
            line += byte
    return line.decode().strip()


def _killed(process: subprocess.Popen[bytes]) -> str:
    """See that it is gone; what it wrote to its stderr, if that is a pipe, after a colon."""
    try:
        process.wait(TERMINATE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    reason = process.stderr.read().decode(errors="replace").strip() if process.stderr else ""
    return f": {reason}" if reason else ""


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Terminate all; kill those that are still there a little later."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + TERMINATE_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(deadline - time.monotonic(), 0))
        if process.poll() is None:
            process.kill()
        with process:  # closes its pipes, and waits
            pass

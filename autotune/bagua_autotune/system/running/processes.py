"""Ends all processes that a command has started.

torchrun starts its ranks in sessions of their own, so a signal to a process group does not reach
them, and they outlive a torchrun that was killed. So the process tree is read from /proc, and we
adopt processes that lose their parent (Linux: PR_SET_CHILD_SUBREAPER), so that they stay in it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
GRACE_SECONDS = 5.0
KILLED_SECONDS = 10.0
POLL_SECONDS = 0.02


@contextmanager
def ended_with_all_it_starts(process: subprocess.Popen[bytes], known: set[int]) -> Iterator[None]:
    """When the block ends, end ``process`` and all that it has started.

    Args:
        known: our other children.
    """
    try:
        yield
    finally:
        _end(process, known)


@contextmanager
def adopting() -> Iterator[set[int]]:
    """Adopt processes that lose their parent inside the block; gives our earlier children."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()
    libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield set(_children().get(os.getpid(), []))
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def _end(process: subprocess.Popen[bytes], known: set[int]) -> None:
    """End the processes: ask them first, and kill them after a while."""
    asked: set[int] = set()
    began = time.monotonic()
    while True:
        process.poll()
        left = _started(known)
        _reap(left - {process.pid})
        waited = time.monotonic() - began
        if not left or waited > GRACE_SECONDS + KILLED_SECONDS:
            return
        is_last = waited > GRACE_SECONDS
        for pid in left if is_last else left - asked:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL if is_last else signal.SIGTERM)
        asked |= left
        time.sleep(POLL_SECONDS)


def _started(known: set[int]) -> set[int]:
    """All our descendants except ``known`` and theirs."""
    children = _children()
    found: set[int] = set()
    upcoming = [pid for pid in children.get(os.getpid(), []) if pid not in known]
    while upcoming:
        pid = upcoming.pop()
        if pid not in found:
            found.add(pid)
            upcoming += children.get(pid, [])
    return found


def _reap(pids: set[int]) -> None:
    """Reap those of our children that have ended."""
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _children() -> dict[int, list[int]]:
    """The children of every visible process of this machine."""
    found: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError, IndexError, ValueError):
            # The name before, in parentheses, may hold anything.
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            found.setdefault(int(fields[1]), []).append(int(folder.name))
    return found

"""The programs of iproute2 and util-linux that the testbed is made with."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Sequence

SYSTEM_FOLDERS = "/usr/sbin:/sbin"
"""Debian has ``tc`` there, and an ordinary user's PATH has neither."""


class ToolError(Exception):
    """A program is missing or refused; the message says which and why."""


def path_of(name: str) -> str:
    """Where the program ``name`` is.

    Raises:
        ToolError: it is not installed.
    """
    path = shutil.which(name) or shutil.which(name, path=SYSTEM_FOLDERS)
    if path is None:
        raise ToolError(f"{name} is not installed")
    return path


def run(*command: str) -> str:
    """What ``command`` prints; killed with the calling thread, lest it makes something afterwards.

    Raises:
        ToolError: it is not installed, or failed.
    """
    return _output(command, dies_with_parent())


def _output(command: Sequence[str], prefix: Sequence[str] = ()) -> str:
    words = [*prefix, path_of(command[0]), *command[1:]]  # the prefix names what lacks less clearly
    try:
        done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise ToolError(f"{command[0]} cannot be run: {error.strerror}") from error
    if done.returncode:
        raise ToolError(f"'{' '.join(command)}' failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


def works(*command: str) -> bool:
    """Whether ``command`` is installed and succeeds."""
    try:
        _output(command)
    except ToolError:
        return False
    return True


@functools.cache
def dies_with_parent() -> Sequence[str]:
    """What to put before a command so that it is killed when who started it is gone, however.

    Strictly, when the thread that started it is gone (PR_SET_PDEATHSIG, prctl(2)).
    """
    prefix = ("setpriv", "--pdeathsig", "KILL")
    return prefix if works(*prefix, "true") else ()


@functools.cache
def before_others() -> Sequence[str]:
    """What to put before a command so that no other process delays it, as far as permitted.

    The order of bucket sizes is lost in the noise of a neighbour that gets its turn in between.
    """
    real_time = ("chrt", "--rr", "1")
    if works(*real_time, "true"):
        return real_time
    nice = ("nice", "-n", "-10")
    if shutil.which("nice") and run(*nice, "nice").strip() == "-10":  # else it only warns
        return nice
    return ()

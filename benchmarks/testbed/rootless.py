"""Hosts for who is not root: namespaces of one's own, in which one is (user_namespaces(7))."""

from __future__ import annotations

import os
import socket
import sys

from .relay import LISTENER
from .tools import works

USER = "BAGUA_TESTBED_USER"
"""Who started this program, where it runs in such namespaces; a number."""
UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--mount")
# Named namespaces need a /run that can be written; what runs on loopback needs that to be up.
PREPARE = 'mount -t tmpfs tmpfs /run && ip link set lo up && exec "$@"'


def enter(listening: socket.socket | None = None) -> None:
    """Start this program again, in its place, where an ordinary user may make hosts; returns where
    there is no need to, or the kernel does not allow it.

    Call it first: what was done before is done again. The process remains the same, so signals
    reach it, and all namespaces go with it. This machine's own network is out of reach then.

    Args:
        listening: a socket that ``relay.listener`` made, and will find again.
    """
    if os.geteuid() == 0 or not works(*UNSHARE, "sh", "-c", PREPARE, "sh", "true"):
        return
    os.environ[USER] = str(os.geteuid())
    if listening is not None:
        listening.set_inheritable(True)
        os.environ[LISTENER] = str(listening.fileno())
    again = [sys.executable, *sys.orig_argv[1:]]
    sys.stdout.flush()
    os.execvp(UNSHARE[0], [*UNSHARE, "sh", "-c", PREPARE, "sh", *again])


def user() -> int:
    """The number of whoever started this program, in such namespaces or not."""
    return int(os.environ.get(USER, os.geteuid()))

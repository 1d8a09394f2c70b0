"""Whether another process of this machine does the same."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

PREFIX = "\0bagua-autotune-"


@contextmanager
def alone(key: str) -> Iterator[bool]:
    """False if another process is in a block with this key.

    It is known by a name of a socket that is no file (Linux: the abstract namespace), so nothing is
    left of a process that was killed, and the processes that it started do not hold it.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as held:
        try:
            held.bind(PREFIX + key)
        except OSError:
            yield False
            return
        yield True

"""What the processes of one service count, put together: a scrape reaches any one of them.

Each tells the others its counts over a socket of its own. All that it counts has the label
``process``, its number: so each series belongs to one process and begins at 0 with it, as those of
a replica do, and nothing is counted twice.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

logger = logging.getLogger(__name__)

# Of another process that stands still: a scrape then goes without its counts.
PATIENCE_SECONDS = 1.0
CHUNK_BYTES = 2**16


class Counts(NamedTuple):
    """What one process counts, as text: of each of its families, and of the steps of each job."""

    families: Sequence[bytes]
    steps: Mapping[str, bytes]


class Siblings:
    """The processes of a service, as one of them sees them.

    Args:
        number: of this one.
        sockets: on which each of them tells its counts, see ``listeners``.
    """

    def __init__(self, number: int, sockets: Sequence[socket.socket]) -> None:
        self.number = number
        self._sockets = sockets

    def tell(self, counts: Callable[[], Counts]) -> None:
        """Begin to tell the others what this process counts, in a thread that ends with it."""
        threading.Thread(target=self._tell, args=[counts], daemon=True).start()

    def ask(self) -> list[Counts]:
        """What the others count; without those that do not answer."""
        found = []
        for number, listener in enumerate(self._sockets):
            if number != self.number:
                try:
                    found.append(_receive(listener))
                except OSError as error:
                    logger.warning("the metrics are without process %d: %s", number, error)
        return found

    def _tell(self, counts: Callable[[], Counts]) -> None:
        while True:
            asking, _ = self._sockets[self.number].accept()
            with asking, suppress(OSError):  # it waited too long
                asking.settimeout(PATIENCE_SECONDS)
                asking.sendall(_as_json(counts()))


def listeners(count: int) -> list[socket.socket]:
    """Sockets for so many processes, in no folder; only Linux has such."""
    found = []
    for _ in range(count):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("")
        listener.listen()
        found.append(listener)
    return found


def _receive(listener: socket.socket) -> Counts:
    parts = []
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(PATIENCE_SECONDS)
        asking.connect(listener.getsockname())
        while part := asking.recv(CHUNK_BYTES):
            parts.append(part)
    if not parts:
        raise ConnectionError("it ended")
    families, steps = json.loads(b"".join(parts))
    return Counts(
        [samples.encode() for samples in families],
        {job_id: samples.encode() for job_id, samples in steps.items()},
    )


def _as_json(counts: Counts) -> bytes:
    steps = {job_id: samples.decode() for job_id, samples in counts.steps.items()}
    return json.dumps([[samples.decode() for samples in counts.families], steps]).encode()

"""The loop of waitress, which asks only those connections anew that may have changed.

Waitress asks each connection in each round whether it is to be read or written: with a connection
for each rank, most of them idle, that took most of the interpreter's time. The kernel remembers
what an idle one waits for.
"""

from __future__ import annotations

import selectors
from select import POLLIN, POLLOUT
from selectors import EVENT_READ, EVENT_WRITE
from typing import Any, Protocol

from waitress.wasyncore import readwrite


class Connected(Protocol):
    """What waitress keeps by descriptor: a connection, the listener, or what wakes the loop."""

    accepting: bool

    def readable(self) -> object: ...

    def writable(self) -> object: ...


class Loop:
    """Waits until something can be read or written, and has it done.

    Args:
        objects: of waitress, by descriptor; those that are there now are asked in each round.
        timeout_seconds: of a round in which nothing comes.
    """

    def __init__(self, objects: dict[int, Any], timeout_seconds: float) -> None:
        self._objects = objects
        self._timeout_seconds = timeout_seconds
        self._always = tuple(objects)
        self._changing: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._known: dict[int, tuple[Connected, int]] = {}

    def changes(self, descriptor: int) -> None:
        """Ask this connection in each round from now on, until it is idle."""
        self._changing.add(descriptor)

    def run(self) -> None:
        """Go on until nothing is left."""
        with self._selector:
            while self._objects:
                self._ask()
                for key, events in self._selector.select(self._timeout_seconds):
                    self._changing.add(key.fd)
                    found = self._objects.get(key.fd)
                    if found is not None:
                        reads, writes = events & EVENT_READ, events & EVENT_WRITE
                        readwrite(found, (POLLIN if reads else 0) | (POLLOUT if writes else 0))

    def _ask(self) -> None:
        for descriptor in self._always:
            self._wait_for(descriptor)
        for descriptor in list(self._changing):
            found = self._objects.get(descriptor)
            # Before it is asked: one that is idle by then is changed by nobody else.
            if found is None or getattr(found, "is_idle", False):
                self._changing.discard(descriptor)
            self._wait_for(descriptor)

    def _wait_for(self, descriptor: int) -> None:
        found = self._objects.get(descriptor)
        known, before = self._known.get(descriptor, (None, 0))
        if known is not found and known is not None:
            if before:
                self._selector.unregister(descriptor)  # closed, and perhaps another's by now
            del self._known[descriptor]
            before = 0
        if found is None:
            return
        wanted = EVENT_READ if found.readable() else 0
        if found.writable() and not found.accepting:
            wanted |= EVENT_WRITE
        if wanted == before:
            return
        if not before:
            self._selector.register(descriptor, wanted)
        elif wanted:
            self._selector.modify(descriptor, wanted)
        else:
            self._selector.unregister(descriptor)
        self._known[descriptor] = found, wanted

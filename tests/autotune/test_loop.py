"""The loop asks only those connections that may have changed, and misses no change."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import requests
from flask import Flask

from bagua_autotune import connections
from bagua_autotune.connections import Loop
from tests.autotune.server import serving_here

PATIENCE_SECONDS = 60
IDLE = 200


class End:
    """One end of a connection; what it reads goes to ``got``."""

    accepting = False

    def __init__(self, connection: socket.socket, objects: dict[int, Any]) -> None:
        self.socket, self.asked, self.is_idle, self.reads = connection, 0, True, True
        self.got: Callable[[bytes], None] = lambda _: None
        objects[connection.fileno()] = self

    def readable(self) -> bool:
        self.asked += 1
        return self.reads

    def writable(self) -> bool:
        return False

    def handle_read_event(self) -> None:
        self.got(self.socket.recv(100))


@pytest.fixture
def pairs() -> Iterator[Callable[[], tuple[socket.socket, socket.socket]]]:
    with ExitStack() as opened:

        def make() -> tuple[socket.socket, socket.socket]:
            ours, theirs = socket.socketpair()
            return opened.enter_context(ours), opened.enter_context(theirs)

        yield make


def test_one_that_was_closed_gives_its_descriptor_to_another(
    pairs: Callable[[], tuple[socket.socket, socket.socket]],
) -> None:
    objects: dict[int, Any] = {}
    ours, theirs = pairs()
    first = End(ours, objects)
    loop = Loop(objects, PATIENCE_SECONDS)
    told: list[bytes] = []

    def end_with(content: bytes) -> None:
        told.append(content)
        objects.clear()

    def close_and_accept(content: bytes) -> None:
        told.append(content)
        number = first.socket.fileno()
        other, others_peer = pairs()
        os.dup2(other.fileno(), number)  # closes it, and another has its number
        second = End(socket.socket(fileno=os.dup(number)), {})
        objects[number] = second
        loop.changes(number)
        second.got = end_with
        others_peer.send(b"second")

    first.got = close_and_accept
    theirs.send(b"first")
    loop.run()
    assert told == [b"first", b"second"]


def test_what_a_thread_ends_while_it_is_asked_is_not_missed(
    pairs: Callable[[], tuple[socket.socket, socket.socket]],
) -> None:
    objects: dict[int, Any] = {}
    ours, theirs = pairs()

    class Busy(End):
        """Its thread has answered between the two questions."""

        def readable(self) -> bool:
            was_busy, self.is_idle = not self.is_idle, True
            return not was_busy

    loop = Loop(objects, timeout_seconds=0.01)
    busy = Busy(ours, objects)
    busy.is_idle = False
    busy.got = lambda _: objects.clear()
    loop.changes(ours.fileno())
    theirs.send(b"more")
    loop.run()
    assert not objects


def test_idle_connections_are_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    readable = connections._Channel.readable

    def counted(channel: connections._Channel) -> bool:
        asked.append(1)
        return bool(readable(channel))

    monkeypatch.setattr(connections._Channel, "readable", counted)
    app = Flask(__name__)
    app.add_url_rule("/", view_func=lambda: "answer")
    with ExitStack() as opened:
        url = opened.enter_context(serving_here(app))
        port = int(url.rpartition(":")[2])
        for _ in range(IDLE):
            opened.enter_context(socket.create_connection(("127.0.0.1", port)))
        session = opened.enter_context(requests.Session())
        assert session.get(url, timeout=PATIENCE_SECONDS).text == "answer"
        asked.clear()
        for _ in range(10):
            assert session.get(url, timeout=PATIENCE_SECONDS).text == "answer"
    assert len(asked) < IDLE, "not all of them for each request"

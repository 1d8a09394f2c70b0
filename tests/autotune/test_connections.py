"""The service's connections: bodies judged by their headers, room made for new ones, and the loop
that asks them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
import requests
from flask import Flask
from pydantic import SecretStr

from bagua_autotune import connections
from bagua_autotune.api.bodies import LARGEST_BODY_BYTES
from bagua_autotune.app import create_app
from bagua_autotune.connections import Loop
from bagua_autotune.settings import Settings
from bagua_autotune.store import Store
from tests.autotune.api.driving import of, parsed
from tests.autotune.server import PATIENCE_SECONDS, ServeProcess, serving_here
from tests.autotune.support import MIB


def announce(url: str, size_bytes: int, **headers: str) -> socket.socket:
    """A connection on which the headers of a body of that size were sent, and no body."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS)
    given = {"Host": "localhost", "Content-Type": "application/json", **headers}
    lines = [f"{name}: {value}\r\n" for name, value in given.items()]
    head = "PUT /api/v2/jobs/job HTTP/1.1\r\n" + "".join(lines)
    connection.sendall(f"{head}Content-Length: {size_bytes}\r\n\r\n".encode())
    return connection


def body_files(pid: int) -> int:
    """How many files without a name it has open; waitress keeps bodies in such."""
    found = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found += link.readlink().name.endswith("(deleted)")
    return found


def test_without_the_token_a_body_is_refused_by_its_headers_and_kept_nowhere(
    tmp_path: Path,
) -> None:
    size = 4 * MIB
    with ServeProcess(tmp_path / "a.db", BAGUA_AUTOTUNE_TOKEN="open") as service:
        with announce(service.url, size) as connection:
            answer = connection.makefile("rb")
            assert answer.readline().split()[1] == b"401", "before any of the body came"
            while line := answer.readline().strip():
                if line.startswith(b"Content-Length"):
                    length = int(line.split()[1])
            assert b"BAGUA_AUTOTUNE_TOKEN" in answer.read(length)
            # What comes of the body is dropped, and the connection serves on.
            connection.sendall(b"x" * (size - 10))
            assert body_files(service.process.pid) == 0
            connection.sendall(b"x" * 10 + b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert answer.readline().split()[1] == b"200"
        with announce(service.url, size, Authorization="Bearer open") as connection:
            connection.sendall(b" " * (size - 1) + b"x")
            answer = connection.makefile("rb")
            assert answer.readline().split()[1] == b"400", "with the token it is read"


def test_what_its_headers_rule_out_is_refused_in_the_form_of_all_errors() -> None:
    """A body of unknown length, one that is too large, before it is sent, and long headers."""
    with closing(Store("sqlite://")) as store, serving_here(create_app(Settings(), store)) as url:
        answer = requests.post(
            f"{url}/api/v2/prune",
            data=iter([b"{}"]),
            headers={"Content-Type": "application/json"},
            timeout=PATIENCE_SECONDS,
        )
        assert answer.status_code == 411
        assert answer.headers["Content-Type"] == "application/problem+json"
        assert "Content-Length" in answer.json()["detail"]
        with announce(url, LARGEST_BODY_BYTES + 1) as connection:
            assert connection.makefile("rb").readline().split()[1] == b"413"
        for length, status in ((15_000, 200), (17_000, 431)):
            answer = requests.get(
                f"{url}/healthz", headers={"A": "x" * length}, timeout=PATIENCE_SECONDS
            )
            assert answer.status_code == status
        assert answer.headers["Content-Type"] == "application/problem+json"


def test_bodies_that_would_not_fit_beside_those_that_come_are_told_to_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MOST_BUFFERED_BYTES", 12 * MIB)
    with ExitStack() as opened:
        store = opened.enter_context(closing(Store(f"sqlite:///{tmp_path / 'a.db'}")))
        url = opened.enter_context(serving_here(create_app(Settings(), store)))
        first = opened.enter_context(announce(url, 8 * MIB, Expect="100-continue"))
        answers = first.makefile("rb")
        # It has its place from here on; announced only, the next one might be read before it.
        assert answers.readline().split()[1] == b"100"
        session = opened.enter_context(requests.Session())

        def put() -> requests.Response:
            body, is_json = b" " * (8 * MIB), {"Content-Type": "application/json"}
            to = f"{url}/api/v2/jobs/job"
            return session.put(to, data=body, headers=is_json, timeout=PATIENCE_SECONDS)

        refused = put()
        assert refused.status_code == refused.json()["status"] == 503
        assert refused.headers["Content-Type"] == "application/problem+json"
        assert int(refused.headers["Retry-After"]) > 0
        # Its body was dropped, and the connection serves on.
        assert session.get(f"{url}/healthz", timeout=PATIENCE_SECONDS).ok
        assert answers.readline() == b"\r\n"
        first.sendall(b" " * (8 * MIB))
        assert answers.readline().split()[1] == b"400"
        # There is room for it soon, when the answered body was closed.
        until = time.monotonic() + PATIENCE_SECONDS
        while (answer := put()).status_code == 503 and time.monotonic() < until:
            time.sleep(0.05)
        assert answer.status_code == 400


@pytest.mark.slow
def test_idle_connections_make_room_where_few_files_may_be_open(tmp_path: Path) -> None:
    with ServeProcess(tmp_path / "a.db", files=320) as service:
        assert "room for 32 connections" in service.log()
        kept: list[requests.Session] = []

        def ask_on_new_connections() -> None:
            for _ in range(40):
                kept.append(requests.Session())
                assert kept[-1].get(f"{service.url}/healthz", timeout=PATIENCE_SECONDS).ok

        # Several wait to be accepted whenever some are closed.
        with ThreadPoolExecutor(6) as pool:
            for asked in [pool.submit(ask_on_new_connections) for _ in range(6)]:
                asked.result()
        found = parsed(kept[-1].get(f"{service.url}/metrics", timeout=PATIENCE_SECONDS).text)
        assert of(found, "connections_limit") == {(): 32}
        assert 0 < of(found, "connections")[()] <= 32
        for session in kept:
            session.close()
        # Also those of whose requests nothing more comes.
        stalled = [announce(service.url, 1000) for _ in range(50)]
        assert requests.get(f"{service.url}/healthz", timeout=PATIENCE_SECONDS).ok
        for connection in stalled:
            connection.close()
        # No line of it for each.
        assert service.log().count("\n") < 10, service.log()


def test_a_request_that_is_coming_does_not_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "STALLED_SECONDS", float("inf"))
    with ExitStack() as opened:
        store = opened.enter_context(closing(Store(f"sqlite:///{tmp_path / 'a.db'}")))
        app = create_app(Settings(), store)
        url = opened.enter_context(serving_here(app, connections=32))
        coming = opened.enter_context(announce(url, 2))
        for _ in range(100):
            session = opened.enter_context(requests.Session())
            assert session.get(f"{url}/healthz", timeout=PATIENCE_SECONDS).ok
        coming.sendall(b"{}")
        assert coming.makefile("rb").readline().split()[1] == b"422"


def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be() -> None:
    code = (
        "import resource; from bagua_autotune.connections import *;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024));"
        "print(raise_descriptors(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["384", "1024", "1024"]


def test_a_short_body_is_judged_once_and_a_long_one_by_its_headers_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = []

    def takes(_app: Flask, environ: dict[str, str]) -> bool:
        judged.append(int(environ["CONTENT_LENGTH"]))
        return True

    monkeypatch.setattr(connections, "takes_body", takes)
    with closing(Store(f"sqlite:///{tmp_path / 'a.db'}")) as store:
        app = create_app(Settings(token=SecretStr("open")), store)
        with serving_here(app) as url:
            for length in (100, 16 * 1024, 16 * 1024 + 1):
                with announce(url, length) as connection:
                    connection.sendall(b" " * length)
                    assert connection.makefile("rb").readline().split()[1] == b"401"
    assert judged == [16 * 1024 + 1]


def test_a_long_answer_comes_whole_to_who_reads_it_slowly() -> None:
    part = b"x" * MIB
    app = Flask(__name__)
    app.add_url_rule("/", view_func=lambda: app.response_class(part for _ in range(40)))
    with serving_here(app) as url, requests.get(url, stream=True, timeout=PATIENCE_SECONDS) as got:
        received = 0
        for chunk in got.iter_content(MIB):
            received += len(chunk)
            time.sleep(0.01)
    assert received == 40 * MIB, "more than waitress keeps before it waits for the reader"


def test_the_loop_sends_only_what_no_thread_does() -> None:
    """Asked while a thread answers, it went round and round for the lock, and took half of the
    interpreter's time."""
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.create_server(("127.0.0.1", 0)) as listener:
        server = connections.Server(Flask(__name__), listener, connections.FEWEST_CONNECTIONS)
        channel = connections._Channel(server, ours, None, server.adj, map={})
        for answering, unsent_bytes, closes, expected in (
            (True, 10, False, False),
            (True, server.adj.outbuf_high_watermark + 1, False, True),  # the thread waits
            (True, 10, True, True),
            (False, 10, False, True),
            (False, 0, False, False),
        ):
            channel.requests = [None] * answering
            channel.total_outbufs_len, channel.will_close = unsent_bytes, closes
            assert channel.writable() is expected
        channel.will_close = False
        server.close()


def test_what_has_come_is_answered_before_the_threads_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A training says goodbye and ends its service at once; waitress logged that as a warning."""
    dispatcher, answered = connections.Dispatcher(), []
    ending = threading.Thread(target=dispatcher.shutdown)

    class Request:
        def __init__(self, seconds: float) -> None:
            self._seconds = seconds

        def service(self) -> None:
            if not ending.is_alive():
                ending.start()
            time.sleep(self._seconds)  # the end has begun by then
            answered.append(self._seconds)

        def cancel(self) -> None:
            answered.append(-1)

    dispatcher.set_thread_count(1)
    requests_that_came = [Request(0.3), Request(0.0)]
    with dispatcher.lock:
        dispatcher.queue.extend(requests_that_came)
        dispatcher.queue_cv.notify()
    while not answered:
        time.sleep(0.01)
    ending.join(PATIENCE_SECONDS)
    assert answered == [0.3, 0.0]
    assert not dispatcher.threads
    assert caplog.messages == []


# The loop asks only those connections that may have changed, and misses no change.
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

"""The connections of waitress, which buffers each body whole before the application sees a request.

Four things are added. Headers alone decide whether a long body is buffered: one that is not wanted
is answered at once, and dropped as it comes. Large bodies wait for one another, so that the memory
of one is all that they take, and a thread is always free for what is short. Where all connections
are taken, those that were idle longest make room; one with a request only if nothing more comes of
it. And idle connections cost nothing (see Loop).

Other servers do not hold what stalls. With 16 threads and 50 clients that sent a part of a body,
gunicorn 27 (gthread) and granian 2.8 answered nobody for the minute that was watched, cheroot 11
for 20 s: they wait for it in the application's threads, gunicorn and cheroot for headers, too.
Gunicorn and granian also fork. On uvicorn, which waits in its loop, all but the last of these four
would be ours again, in ASGI.
"""

from __future__ import annotations

import resource
import selectors
import socket
import sys
import time
from http import HTTPStatus
from select import POLLIN, POLLOUT
from selectors import EVENT_READ, EVENT_WRITE
from typing import Any

from flask import Flask
from waitress.adjustments import Adjustments
from waitress.channel import HTTPChannel
from waitress.parser import HTTPRequestParser
from waitress.server import TcpWSGIServer
from waitress.task import ErrorTask, ThreadedTaskDispatcher, WSGITask
from waitress.utilities import Error
from waitress.wasyncore import readwrite

from bagua_autotune.api.admission import takes_body
from bagua_autotune.api.bodies import USUAL
from bagua_autotune.api.errors import RETRY_AFTER_SECONDS, ErrorDocument


class Loop:
    """Waits until something can be read or written, and has it done.

    Waitress's own asks each connection in each round what it waits for, which took most of the
    interpreter's time where most are idle. This one asks those that may have changed; of the others
    the kernel remembers it.

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

    def changes(self, descriptor: int) -> None:
        """Ask this connection in each round from now on, until it is idle."""
        self._changing.add(descriptor)

    def run(self) -> None:
        """Go on until nothing is left."""
        with self._selector:
            while self._objects:
                for descriptor in self._always:  # the listener may have others change, to make room
                    self._wait_for(descriptor)
                for descriptor in list(self._changing):
                    self._wait_for(descriptor)
                for key, events in self._selector.select(self._timeout_seconds):
                    self._changing.add(key.fd)
                    found = self._objects.get(key.fd)
                    if found is not None:
                        reads, writes = events & EVENT_READ, events & EVENT_WRITE
                        readwrite(found, (POLLIN if reads else 0) | (POLLOUT if writes else 0))

    def _wait_for(self, descriptor: int) -> None:
        found = self._objects.get(descriptor)
        # Before it is asked: one that is idle by then is changed by nobody else.
        if found is None or getattr(found, "is_idle", False):
            self._changing.discard(descriptor)
        key = self._selector.get_map().get(descriptor)
        if key is not None and key.data is not found:
            self._selector.unregister(descriptor)  # closed, and perhaps another's by now
            key = None
        if found is None:
            return
        wanted = EVENT_READ if found.readable() else 0
        if found.writable() and not found.accepting:
            wanted |= EVENT_WRITE
        if key is None and wanted:
            self._selector.register(descriptor, wanted, found)
        elif key is not None and not wanted:
            self._selector.unregister(descriptor)
        elif key is not None and key.events != wanted:
            self._selector.modify(descriptor, wanted, found)


THREADS = 16
# Every rank of a Bagua job keeps a connection open; waitress's own limit is 100.
MOST_CONNECTIONS = 4000
# A connection has its socket, and the file of a body that is not kept in memory.
DESCRIPTORS_EACH = 2
OTHER_DESCRIPTORS = 256
FEWEST_CONNECTIONS = 32
# Of the headers of a request; a browser's are longer than any other.
LONGEST_HEADERS_BYTES = 16 * 1024
# Bodies that are buffered at a time. They fit into the /tmp of the containers in deploy.
MOST_BUFFERED_BYTES = 256 * 1024**2
# Accepted, or closed to make room, at once; and never more than this share of all.
ROOM = 16
ROOM_SHARE = 8
# Between two packets of a request; one that is lost is sent again within less.
STALLED_SECONDS = 2.0
# Between two looks at whether all is answered that had come before the end.
END_LOOK_SECONDS = 0.01


def raise_descriptors() -> int:
    """Raise the limit of open files if that is allowed; return how many connections it leaves room
    for.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (sys.maxsize if each == resource.RLIM_INFINITY else each for each in limits)
    allowed = max(soft, min(MOST_CONNECTIONS * DESCRIPTORS_EACH + OTHER_DESCRIPTORS, hard))
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, limits[1]))
    room = (allowed - OTHER_DESCRIPTORS) // DESCRIPTORS_EACH
    return min(MOST_CONNECTIONS, max(FEWEST_CONNECTIONS, room))


class _Refused(Error):  # type: ignore[misc]  # waitress has no types
    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.code, self.reason = status.value, status.phrase


class _Problem(ErrorTask):  # type: ignore[misc]
    """What waitress or this module refuses, in the form of all other errors."""

    def execute(self) -> None:
        error = self.request.error
        detail = f"{error.reason}: {error.body}."
        document = ErrorDocument(title=error.reason, status=error.code, detail=detail)
        body = document.model_dump_json().encode()
        self.status = f"{error.code} {error.reason}"
        self.response_headers.append(("Content-Type", "application/problem+json"))
        if error.code == HTTPStatus.SERVICE_UNAVAILABLE:
            self.response_headers.append(("Retry-After", str(RETRY_AFTER_SECONDS)))
        else:
            self.set_close_on_finish()  # nobody knows where the next request would begin
        self.content_length = len(body)
        self.write(body)


class _Request(HTTPRequestParser):  # type: ignore[misc]
    """One request as it comes in, judged as soon as its headers are there."""

    error: Error | None

    def __init__(self, adj: Adjustments, channel: _Channel) -> None:
        super().__init__(adj)
        self._channel = channel
        self._is_judged = False

    @property
    def buffered_bytes(self) -> int:
        return self.content_length if self.body_rcv is not None else 0

    def received(self, data: bytes) -> int:
        consumed = int(super().received(data))
        if self._is_judged or not self.headers_finished or self.error or self.body_rcv is None:
            return consumed
        self._is_judged, server = True, self._channel.server
        if self.chunked:
            why = "the body must come with a Content-Length"
            self.error = _Refused(HTTPStatus.LENGTH_REQUIRED, why)
            self._end_here()
        elif self.content_length <= LONGEST_HEADERS_BYTES:
            pass  # it takes no more than headers do, and the application judges it anyway
        elif not takes_body(server.app, WSGITask(self._channel, self).get_environment()):
            consumed += self._drop_body(len(data) - consumed)
        elif server.buffered_bytes() > MOST_BUFFERED_BYTES:  # with this one
            why = "too many large bodies come at once; try again"
            self.error = _Refused(HTTPStatus.SERVICE_UNAVAILABLE, why)
            consumed += self._drop_body(len(data) - consumed)
        return consumed

    def _end_here(self) -> None:
        """Have the request answered now, without its body."""
        self.completed, self.expect_continue, self.body_rcv = True, False, None

    def _drop_body(self, arrived_bytes: int) -> int:
        """Refuse the request, and drop the rest of its body; how much of it is dropped already."""
        self._end_here()
        dropped = min(arrived_bytes, self.content_length)
        if dropped < self.content_length:
            self._channel.unwanted_bytes = self.content_length - dropped
            self._channel.then_close = self.connection_close
            # Closed while a client sends, it would never see the answer.
            self.headers["CONNECTION"] = "keep-alive"
        return int(dropped)


class _Channel(HTTPChannel):  # type: ignore[misc]
    """A connection to one client."""

    error_task_class = _Problem
    server: Server
    unwanted_bytes = 0
    """So many of the bytes that come next are dropped."""
    then_close = False

    def add_channel(self, objects: dict[int, Any] | None = None) -> None:
        super().add_channel(objects)
        self.server.loop.changes(self._fileno)

    @property
    def is_idle(self) -> bool:
        """Whether it only waits for a request, or for more of one."""
        is_busy = self.requests or self.total_outbufs_len  # first: who answers closes afterwards
        return not (is_busy or self.will_close or self.close_when_flushed)

    def parser_class(self, adj: Adjustments) -> _Request:
        return _Request(adj, self)

    def received(self, data: bytes) -> bool:
        if self.unwanted_bytes:
            dropped = min(self.unwanted_bytes, len(data))
            self.unwanted_bytes -= dropped
            data = data[dropped:]
            if not self.unwanted_bytes and self.then_close:
                self.close_when_flushed = True
        return bool(super().received(data))

    def writable(self) -> bool:
        """Whether the loop must send. It need not while a thread answers, which sends by itself:
        for as long as that thread waited for the interpreter, the loop would go round and round.
        """
        if self.requests and self.total_outbufs_len <= self.adj.outbuf_high_watermark:
            return bool(self.will_close)
        return bool(super().writable())

    def may_close(self, now: float) -> bool:
        """Whether no request is being read or answered, or what was coming of it has stalled."""
        if self.will_close or self.requests or self.total_outbufs_len:
            return False
        is_coming = self.request is not None or self.unwanted_bytes
        return not is_coming or now - self.last_activity > STALLED_SECONDS

    def has_unread(self) -> bool:
        """Whether more has come than was read yet, as the request that ends an idle time."""
        try:
            return bool(self.socket.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def buffered_bytes(self) -> int:
        """The bytes of all requests that are here or on their way."""
        coming = [self.request] if self.request else []
        return sum(request.buffered_bytes for request in [*self.requests, *coming])


class Dispatcher(ThreadedTaskDispatcher):  # type: ignore[misc]
    """Threads that answer requests. Waitress's own, told to end, drop each request that none of
    them has begun with, and log a warning; these answer what has come whole."""

    def shutdown(self, cancel_pending: bool = True, timeout: float = 5) -> bool:
        deadline = time.monotonic() + timeout
        while (self.queue or self.active_count) and time.monotonic() < deadline:
            time.sleep(END_LOOK_SECONDS)
        return bool(super().shutdown(cancel_pending, max(deadline - time.monotonic(), 0)))


class Server(TcpWSGIServer):  # type: ignore[misc]
    """Serves the application on the listening socket, over so many connections at a time."""

    channel_class = _Channel

    def __init__(self, app: Flask, listener: socket.socket, connections: int) -> None:
        self.app = app
        self._room = min(ROOM, connections // ROOM_SHARE)
        usual, self._large = Dispatcher(), Dispatcher()
        for dispatcher, threads in ((usual, THREADS), (self._large, 1)):
            dispatcher.set_thread_count(threads)
        adj = Adjustments(
            connection_limit=connections,
            ident=None,
            max_request_header_size=LONGEST_HEADERS_BYTES,
            max_request_body_size=sys.maxsize,  # the application says how long each may be
        )
        address = (listener.family, listener.type, listener.proto, listener.getsockname())
        super().__init__(
            app, _sock=listener, dispatcher=usual, bind_socket=False, sockinfo=address, adj=adj
        )
        self.loop = Loop(self._map, adj.asyncore_loop_timeout)

    def add_task(self, task: _Channel) -> None:
        is_large = bool(task.requests) and task.requests[0].buffered_bytes > USUAL.bytes
        (self._large if is_large else self.task_dispatcher).add_task(task)

    def buffered_bytes(self) -> int:
        return sum(channel.buffered_bytes() for channel in self.active_channels.values())

    def readable(self) -> bool:
        if len(self._map) < self.adj.connection_limit:
            return bool(super().readable())
        # Waitress itself would log two lines whenever a few connections make room.
        self._make_room()
        return False

    def handle_accept(self) -> None:
        """Take several: between two calls every connection is looked at."""
        for _ in range(self._room):
            before = len(self._map)
            if before < self.adj.connection_limit:
                super().handle_accept()
            if len(self._map) == before:
                return

    def run(self) -> None:
        try:
            self.loop.run()
        except (SystemExit, KeyboardInterrupt):
            self.task_dispatcher.shutdown()
        self._large.shutdown()

    def maintenance(self, now: float) -> None:
        super().maintenance(now)
        for channel in self.active_channels.values():
            if channel.will_close:
                self.loop.changes(channel._fileno)

    def _make_room(self) -> None:
        """Close the connections that were idle longest; clients make new ones."""
        now = time.time()
        self.maintenance(now)  # of clients that do not read their answers
        closable = [channel for channel in self.active_channels.values() if channel.may_close(now)]
        for channel in sorted(closable, key=lambda channel: channel.last_activity)[: self._room]:
            # Closed here, amid a round of waitress, its descriptor might become a new connection's
            # in the same round, which would then be closed in its place.
            if not channel.has_unread():
                channel.will_close = True
                self.loop.changes(channel._fileno)

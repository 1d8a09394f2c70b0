"""Many kept-alive connections at once, from a few processes: what services are loaded with."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import TypeVar

PROCESSES = 2
Share = TypeVar("Share")
Result = TypeVar("Result")


class Connection:
    """To a service on this machine."""

    def __init__(self, port: int) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    def get(self, path: str) -> bytes:
        return self._send("GET", path, None)

    def post(self, path: str, content: bytes) -> bytes:
        """The body of the answer.

        Raises:
            OSError, http.client.HTTPException: there was none.
            RuntimeError: its status is neither 200 nor 201.
        """
        return self._send("POST", path, content)

    def put(self, path: str, content: bytes) -> bytes:
        """The same, of what is made or is there already."""
        return self._send("PUT", path, content)

    def _send(self, method: str, path: str, content: bytes | None) -> bytes:
        self._http.request(method, path, content, {"Content-Type": "application/json"})
        # Else 40 ms for the second part of an answer sent in two, as Bagua's service sends them.
        self._http.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        response = self._http.getresponse()
        answer = response.read()
        if response.status not in (200, 201):
            raise RuntimeError(f"{method} {path} was answered {response.status}: {answer[:500]!r}")
        return answer


@contextmanager
def working(
    work: Callable[[Share], Result], shares: Sequence[Share]
) -> Iterator[list[Future[list[Result]]]]:
    """All the shares of the work at once, each in a thread, until the last one is done."""
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("fork")) as pool:
        yield [pool.submit(_in_threads, work, shares[i::PROCESSES]) for i in range(PROCESSES)]


def results(futures: Sequence[Future[list[Result]]]) -> list[Result]:
    return [result for future in futures for result in future.result()]


def _in_threads(work: Callable[[Share], Result], shares: Sequence[Share]) -> list[Result]:
    with ThreadPoolExecutor(max(1, len(shares))) as threads:
        return list(threads.map(work, shares))

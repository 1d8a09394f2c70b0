"""Trainings that begin to be tuned and then end, each in a way of its own.

    python -m tests.client.reporter.endings FOLDER URL KIND...

Each kind is a fork of this process, which has imported all that takes long and has no thread of its
own. Prints for each its exit status, how long its end took, in seconds, and what it wrote to
standard error (a file in FOLDER), as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from torch.utils.data import DataLoader

from bagua_client.environment import Environment
from bagua_client.reporter.inbox import Event
from bagua_client.reporter.reporter import Reporter

DESCRIPTION = {"name": "job", "world_size": 2, "default_configuration": {"bucket_bytes": 512}}


class Squares:
    """A data set; what it gives says which threads its worker has."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[int, str]:
        return index**2, ",".join(thread.name for thread in threading.enumerate())


def _load(context: str) -> None:
    found = list(DataLoader(Squares(), num_workers=1, multiprocessing_context=context))
    assert [int(square) for square, _ in found] == [0, 1, 4, 9]
    assert not any("bagua" in names for _, (names,) in found)


def _raise() -> NoReturn:
    raise ValueError("the training's own")


def _fork() -> None:
    child = os.fork()
    if child == 0:
        sys.exit(5)  # runs the functions that the parent registered for its end
    assert os.waitpid(child, 0)[1] >> 8 == 5


KINDS: dict[str, Callable[[], Any]] = {
    "normal": lambda: None,
    "exception": _raise,
    "sys.exit": lambda: sys.exit(3),
    "os._exit": lambda: os._exit(4),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "fork": _fork,
    "forked workers": lambda: _load("fork"),
    "spawned workers": lambda: _load("spawn"),
}


def _train(url: str, kind: str, errors: str, ready: int) -> None:
    """As a main program would: returns, or leaves by an exception."""
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    reporter = Reporter(Environment(url=url), DESCRIPTION)
    while not reporter._conversation._connection.url:
        time.sleep(0.01)
    reporter.put(Event("drift", None, 1, "in the middle of a request"))
    os.write(ready, b".")
    KINDS[kind]()


def _begin(url: str, kind: str, errors: str) -> int:
    """The id of the process that trains, once it is about to end."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        os.read(reading, 1)
        os.close(reading)
        return child
    os.close(reading)
    _train(url, kind, errors, writing)
    sys.exit(0)


def main() -> None:
    folder, url, *kinds = sys.argv[1:]
    found = {}
    for number, kind in enumerate(kinds):
        errors = f"{folder}/{number}"
        child = _begin(url, kind, errors)
        began = time.monotonic()
        _, status = os.waitpid(child, 0)
        seconds = time.monotonic() - began
        with open(errors) as file:
            found[kind] = (os.waitstatus_to_exitcode(status), seconds, file.read())
    print(json.dumps(found))


if __name__ == "__main__":
    main()

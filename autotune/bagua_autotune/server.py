"""Runs the service: one process with threads or several, until a signal or its parent's end.

Of several processes that serve one address, each is a replica to the database. The one that
started them only watches, and starts again one that ends. It has a listening socket for each, among
which the kernel shares the connections out, and keeps it: what connects while a process is started
again waits for the new one.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import ipaddress
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from bagua_autotune.app import create_app
from bagua_autotune.connections import MOST_CONNECTIONS, Server, raise_descriptors
from bagua_autotune.metrics import Metrics
from bagua_autotune.metrics.exposition import Siblings, listeners
from bagua_autotune.settings import ENVIRONMENT, Settings
from bagua_autotune.store import Store
from bagua_autotune.store.engine.location import parse, shown, with_driver
from bagua_autotune.store.errors import StoreError
from bagua_autotune.tuning.lost_jobs import InHand
from bagua_autotune.upkeep import Upkeep

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
READY = b"ready"
# Takes the process's number, and what to call once it takes requests; returns when it is to end.
Serve = Callable[[int, Callable[[], None]], None]


class ServeError(Exception):
    """The service cannot start; the message says why and what to do."""


class Processes:
    """Context manager: so many processes; all of them are ended with the block.

    Raises:
        ServeError: one of them ended before it took requests; its log says why.
    """

    def __init__(self, count: int, serve: Serve) -> None:
        self._count = count
        self._serve = serve
        self._numbers: dict[int, int] = {}

    def __enter__(self) -> Processes:
        try:
            for number in range(self._count):
                self._start(number)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def watch(self) -> None:
        """Start again each process that ends, for ever."""
        while True:
            pid, status = os.wait()
            number = self._numbers.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            how = f"by signal {-code}" if code < 0 else f"with status {code}"
            logger.error(
                "process %d of the service (pid %d) ended %s; it is started again",
                *(number, pid, how),
            )
            self._start(number)

    def _start(self, number: int) -> None:
        """Start the process of this number, and wait until it takes requests."""
        reading, writing = os.pipe()
        with _without_signals():
            pid = os.fork()
            if not pid:
                os.close(reading)
                self._run(number, writing)
            self._numbers[pid] = number
        os.close(writing)
        with open(reading, "rb") as pipe:
            if pipe.read() != READY:
                raise ServeError(f"process {number} of the service could not be started: see above")

    def _run(self, number: int, writing: int) -> None:
        """What the new process does; never returns."""

        def ready() -> None:
            os.write(writing, READY)
            os.close(writing)

        status = 1
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            self._serve(number, ready)
            status = 0
        except SystemExit:
            status = 0  # a signal ended it
        except (ServeError, StoreError) as error:
            logger.error("%s", error)
        except BaseException:
            logger.exception("process %d of the service failed", number)
        finally:
            logging.shutdown()
            sys.stdout.flush()
            os._exit(status)

    def _end(self) -> None:
        for pid in self._numbers:
            os.kill(pid, signal.SIGTERM)  # not reaped yet, so it is still theirs
        for pid in self._numbers:
            os.waitpid(pid, 0)
        self._numbers.clear()


@contextlib.contextmanager
def _without_signals() -> Iterator[None]:
    """Signals that end the service wait: a process that was just made must not miss them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


PARENT_LOOK_SECONDS = 0.2
# Requests under way may take so long to end; containers are killed after 5 or 10 seconds.
GRACE_SECONDS = 3.0
# A training that ends this service at its own end is gone by then; less than the grace.
PARENT_END_SECONDS = 2.0
NICENESS = 10
M_ARENA_MAX = -8  # of malloc.h
BACKLOG = 1024


class Unguarded(ServeError):
    """The service must not start: everybody in the network could use it."""


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT; prints ``listening on URL`` once requests are taken.

    Raises:
        ServeError: the address cannot be used, or must not be without a token.
        StoreError: the database cannot be used.
    """
    # The service shares its machine with the training, so its linear algebra must stay on one core.
    # numpy reads this when it is imported, which is later.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _share_one_heap()
    # First: process 1 of a container ignores signals without a handler, also while it waits for a
    # database.
    _end_on_signals()
    family, address = _resolve(settings.host)
    if not (address.is_loopback or settings.token or settings.trust_network):
        raise Unguarded(
            f"{settings.host} can be reached from the network: set BAGUA_AUTOTUNE_TOKEN, "
            "or pass --trust-network if everyone there may use the service"
        )
    listening = _listen(family, str(address), settings.port, settings.processes)
    connections = raise_descriptors()
    host = f"[{address}]" if address.version == 6 else str(address)
    port = listening[0].getsockname()[1]

    def announce() -> None:
        elsewhere = _from_other_machines(host, port, address.is_loopback)
        database = shown(with_driver(parse(settings.database)))
        logger.info("the database is %s; %s", database, elsewhere)
        if connections < MOST_CONNECTIONS:
            logger.warning(
                "the limit of open files leaves room for %d connections at a time, where %d are "
                "usual: raise it (LimitNOFILE= of systemd, ulimit -n)",
                *(connections, MOST_CONNECTIONS),
            )
        print(f"listening on http://{host}:{port}", flush=True)

    if settings.processes == 1:
        _serve(settings, listening[0], connections, announce)
        return
    Store(settings.database).close()  # upgraded once, and what is wrong with it is said once
    sockets, pid = listeners(settings.processes), os.getpid()

    def serve_one(number: int, ready: Callable[[], None]) -> None:
        _end_with_parent(pid)
        _serve(settings, listening[number], connections, ready, Siblings(number, sockets))

    with Processes(settings.processes, serve_one) as processes:
        announce()
        processes.watch()


def _serve(
    settings: Settings,
    listener: socket.socket,
    connections: int,
    ready: Callable[[], None],
    siblings: Siblings | None = None,
) -> None:
    """Serve in this process; calls ``ready`` once requests are taken."""
    store = Store(settings.database)
    in_hand = InHand(store)
    pause_seconds = 60 * settings.upkeep_minutes
    upkeep = Upkeep(store, settings.thin_days, settings.keep_days, pause_seconds)
    try:
        if settings.parent_pid is not None:
            # It must not take the cores of the training on the same machine.
            os.nice(NICENESS)
            _end_with_parent(settings.parent_pid)
        told = [in_hand] if settings.parent_pid is not None else []
        app = create_app(settings, store, told, siblings)
        server = Server(app, listener, connections)
        app.extensions[Metrics.__name__].service.watch_connections(
            lambda: len(server.active_channels), connections
        )
        # It takes seconds, and only the first proposal needs it: the service starts meanwhile.
        threading.Thread(target=importlib.import_module, args=("skopt",), daemon=True).start()
        upkeep.start()
        ready()
        server.run()
    finally:
        listener.close()
        upkeep.stop()
        if settings.parent_pid is not None and in_hand.has_jobs and _ends(settings.parent_pid):
            in_hand.end(time.time())  # after all earlier reports are answered
        store.close()


def _from_other_machines(host: str, port: int, is_loopback: bool) -> str:
    name = socket.gethostname()
    if is_loopback:
        tunnel = f"ssh -L {port}:{host}:{port} {name}"
        return f"to see its page from another machine, run there first: {tunnel}"
    return f"other machines find its page at http://{name}:{port}/"


def _share_one_heap() -> None:
    """Make all threads share one heap. Glibc would give each its own, which keeps the memory of its
    largest request."""
    with contextlib.suppress(OSError, AttributeError):  # other C libraries lack it
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def _resolve(
    host: str,
) -> tuple[socket.AddressFamily, ipaddress.IPv4Address | ipaddress.IPv6Address]:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ServeError(f"{host!r} is not an address of this machine: {error}") from error
    return family, ipaddress.ip_address(str(address[0]).partition("%")[0])


def _listen(
    family: socket.AddressFamily, address: str, port: int, count: int
) -> list[socket.socket]:
    """So many sockets that listen at the same port, which nobody else has."""
    try:
        found = [socket.create_server((address, port), family=family, backlog=BACKLOG)]
        if count > 1:
            port = found[0].getsockname()[1]
            found.pop().close()
            of_each: Any = {"family": family, "backlog": BACKLOG, "reuse_port": True}
            found = [socket.create_server((address, port), **of_each) for _ in range(count)]
        return found
    except OSError as error:
        raise ServeError(
            f"cannot listen on {address} port {port}: {error.strerror or error}; "
            f"choose another {_name_of(port)}, or 0 for any free one"
        ) from error


def _name_of(port: int) -> str:
    """The name by which the port was set. A training passes its own variable on as an option."""
    variable = ENVIRONMENT["port"]
    is_set = os.environ.get(variable, "").strip() == str(port)
    return f"{variable} (it is {port})" if is_set else "--port"


def _end_on_signals() -> None:
    def end(_number: int, _frame: FrameType | None) -> None:
        # Some send it twice, as timeout does: the second must not break into the end.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)  # SIG_IGN can print a traceback
        limit = threading.Timer(GRACE_SECONDS, os._exit, [0])
        limit.daemon = True
        limit.start()
        sys.exit(0)  # waitress finishes the answers that it has begun

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)


def _ends(parent_pid: int) -> bool:
    """Whether the parent has ended or does so now: a training ends this service at its exit, and
    takes a moment more itself. One that lives on starts another service, and keeps its jobs."""
    deadline = time.monotonic() + PARENT_END_SECONDS
    while os.getppid() == parent_pid and time.monotonic() < deadline:
        time.sleep(PARENT_LOOK_SECONDS / 10)
    return os.getppid() != parent_pid


def _end_with_parent(parent_pid: int) -> None:
    """End this process when its parent ends, so that it never outlives a killed job."""

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(PARENT_LOOK_SECONDS)
        logger.info("the parent process %d has ended, so the service ends", parent_pid)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_SECONDS)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()

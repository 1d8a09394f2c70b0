"""A database: how connections are made and how long they wait, and transactions on them."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import (
    URL,
    Engine,
    ExceptionContext,
    NullPool,
    QueuePool,
    create_engine,
    event,
)
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.orm import Session

from bagua_autotune.store import migrations
from bagua_autotune.store.errors import NoAnswer, NoDatabase, StoreError
from bagua_autotune.store.location import parse, remote_file_system, shown, with_driver

logger = logging.getLogger(__name__)

SQLITE_BUSY_SECONDS = 30.0
# Fewer than the threads that answer requests, so that some are left while all of these wait.
CONNECTIONS = 12
CONNECTION_WAIT_SECONDS = 2.0
# Longer than a statement may take, which the server then refuses in its own words.
ANSWER_SECONDS = 10.0
SERVER_LIMITS_SECONDS = {
    "statement_timeout": 8.0,
    "lock_timeout": 5.0,
    # What a replica locked that stands still.
    "idle_in_transaction_session_timeout": 30.0,
}
WRITE_AHEAD_LOG = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = NORMAL",
    # In bytes; the log is cut to it after much was written at once.
    "PRAGMA journal_size_limit = 67108864",
)
ROLLBACK_JOURNAL = ("PRAGMA journal_mode = DELETE", "PRAGMA synchronous = FULL")
# Of a server that gave no answer.
RETRY_SECONDS = 2.0


class Database:
    """Transactions on one database, whose schema is created or brought up as it is opened.

    Whoever opens it as found changes nothing, as a service of an older release may be using it.

    Args:
        url: of SQLAlchemy.
        as_found: whether to refuse a database that is not there or has not the schema of this
            release, not make or change it.

    Raises:
        NoDatabase: it is to be used as found, and its file is not there.
        OtherSchema: newer schema, or an older one that cannot be brought up or must not.
        StoreError: bad URL, missing driver, unreachable or unwritable.
    """

    def __init__(self, url: str, *, as_found: bool = False) -> None:
        self.url = with_driver(parse(url))
        self._views = threading.local()
        self._circuit = Circuit()
        self._writers = threading.Lock()
        if as_found and self.is_sqlite and not Path(str(self.url.database)).exists():
            raise NoDatabase(f"there is no database {self}; --database names another")
        try:
            if self.is_sqlite:
                self._engine = _sqlite(self.url)
            else:
                self._engine = _server(self.url, self._circuit)
        except ImportError as error:
            raise StoreError(f"the database {self} needs a driver: {error}") from error
        except (OSError, ArgumentError) as error:
            raise StoreError(f"the database {self} cannot be opened: {error}") from error
        self._reader = self._engine.execution_options(read_only=True)
        try:
            if as_found:
                migrations.check(self._reader)
            elif migrations.is_needed(self._reader):
                self._migrate()
        except SQLAlchemyError as error:
            reason = error.args[0] if error.args else error
            raise StoreError(f"the database {self} cannot be used: {reason}") from error
        if not as_found:
            self._warn_if_remote()

    def _migrate(self) -> None:
        """On a server without limits, as that may take minutes."""
        engine = self._engine if self.is_sqlite else create_engine(self.url, poolclass=NullPool)
        try:
            migrations.prepare(engine)
        finally:
            if engine is not self._engine:
                engine.dispose()

    def _warn_if_remote(self) -> None:
        kind = remote_kind(self.url) if self.is_sqlite else None
        if kind is not None:
            logger.warning(
                "the database %s is on a network file system (%s): it is used without SQLite's "
                "write-ahead log, which is slower, and safe only where that system's locks are; "
                "a folder of this machine, or PostgreSQL, is better",
                *(self, kind),
            )

    def __str__(self) -> str:
        return shown(self.url)

    @property
    def is_sqlite(self) -> bool:
        """Whether it is a file, or in memory."""
        return self.url.get_backend_name() == "sqlite"

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """One consistent view; nothing is written. A thread's inner one is the outer one's."""
        outer = getattr(self._views, "session", None)
        if outer is not None:
            yield outer
            return
        self._circuit.enter()
        with Session(self._reader) as session, session.begin():
            self._views.session = session
            try:
                yield session
            finally:
                self._views.session = None

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """One transaction; on SQLite writers take turns from its first statement on."""
        self._circuit.enter()
        with self._turn(), Session(self._engine) as session, session.begin():
            yield session

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """This process's writers one after the other on SQLite, where those that wait for a lock
        would sleep and try again, and so leave the file idle between two of them."""
        if not self.is_sqlite:
            yield
        elif not self._writers.acquire(timeout=SQLITE_BUSY_SECONDS):
            raise NoAnswer(f"the database was written to for {SQLITE_BUSY_SECONDS:g} s on end")
        else:
            try:
                yield
            finally:
                self._writers.release()

    def close(self) -> None:
        self._engine.dispose()


class Circuit:
    """After a failure lets nobody ask, but for one every RETRY_SECONDS, until one is answered: a
    server that gives no answer must not hold up all who ask, one after the other.

    Args:
        clock: seconds that only go on.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._next_try: float | None = None

    def enter(self) -> None:
        """Raises NoAnswer unless the server may be asked now."""
        with self._lock:
            if self._next_try is None:
                return
            now = self._clock()
            if now < self._next_try:
                raise NoAnswer("the database gave no answer a moment ago")
            self._next_try = now + RETRY_SECONDS

    def answered(self) -> None:
        """The server lives."""
        with self._lock:
            self._next_try = None

    def failed(self) -> None:
        """It could not be reached, or said nothing in time."""
        with self._lock:
            self._next_try = self._clock() + RETRY_SECONDS


def _server(url: URL, circuit: Circuit) -> Engine:
    """On a server, for which nobody waits longer than the limits above; the circuit is told.

    Raises ImportError without the URL's driver, ArgumentError if SQLAlchemy knows none.
    """
    engine = create_engine(
        url,
        pool_size=CONNECTIONS,
        max_overflow=0,
        pool_timeout=CONNECTION_WAIT_SECONDS,
        pool_pre_ping=True,
        # A server that is stopped closes no connection: only the socket's own limit ends the wait.
        connect_args={"timeout": ANSWER_SECONDS} if url.get_driver_name() == "pg8000" else {},
    )
    if url.get_driver_name() == "pg8000":
        connect = _pg8000_connect()
        event.listen(engine, "do_connect", lambda _d, _r, _args, options: connect(**options))

    if engine.dialect.name == "postgresql":
        event.listen(engine, "connect", _set_limits)
    _tell(circuit, engine)

    @event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        # SQLite's transactions have one view from their first statement on; PostgreSQL's have if
        # asked. Not asked by execution options: SQLAlchemy would not see there that a connection
        # was lost, and use it again.
        if (
            connection.get_execution_options().get("read_only")
            and connection.dialect.name == "postgresql"
        ):
            connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")

    return engine


def _set_limits(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    for name, seconds in SERVER_LIMITS_SECONDS.items():
        cursor.execute(f"SET {name} = {round(seconds * 1e3)}")
    connection.commit()


def _tell(circuit: Circuit, engine: Engine) -> None:
    """Whether the engine's server answers."""

    @event.listens_for(engine, "checkout")
    def _checkout(_connection: Any, _record: Any, _proxy: Any) -> None:
        circuit.answered()  # it is a new connection, or was pinged

    @event.listens_for(engine, "handle_error")
    def _failed(context: ExceptionContext) -> None:
        # After a ping without an answer a new connection is tried.
        could_not_connect = context.connection is None
        if not context.is_pre_ping and (could_not_connect or context.is_disconnect):
            circuit.failed()


def _sqlite(url: URL) -> Engine:
    """On a file, whose folder is made, or in memory. Raises OSError if the folder cannot be."""
    options: dict[str, Any] = {}
    journal: tuple[str, ...] = ()
    is_remote = False
    if _is_in_memory(url):
        # A memory database lives in its connection: one for all threads, which take turns.
        options = {"poolclass": QueuePool, "pool_size": 1, "max_overflow": 0}
    else:
        _folder(url).mkdir(parents=True, exist_ok=True)
        is_remote = remote_kind(url) is not None
        journal = ROLLBACK_JOURNAL if is_remote else WRITE_AHEAD_LOG
    arguments = {"check_same_thread": False, "timeout": SQLITE_BUSY_SECONDS}
    engine = create_engine(url, connect_args=arguments, **options)

    @event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: Any) -> None:
        # The driver would begin transactions by itself, and too late: see _begin.
        connection.isolation_level = None
        connection.execute("PRAGMA foreign_keys = ON")
        if connection.execute("PRAGMA page_count").fetchone() == (0,):
            # Only a file that begins so can give back what it does not need any more.
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        for pragma in journal:
            # The file keeps its mode. SQLite does not wait here for another process that sets it
            # too, or uses the file in its older mode, which serves as well.
            with suppress(sqlite3.OperationalError):
                connection.execute(pragma)
        if is_remote and connection.execute("PRAGMA journal_mode").fetchone() == ("wal",):
            raise sqlite3.OperationalError(
                "it is on a network file system, and another process uses it with a write-ahead "
                "log, which may corrupt it there: end that first"
            )

    @event.listens_for(engine, "begin")
    def _begin(connection: Any) -> None:
        # IMMEDIATE: a writer that first reads must not find its view stale when it writes.
        read_only = connection.get_execution_options().get("read_only")
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    return engine


def _pg8000_connect() -> Callable[..., Any]:
    """pg8000's own, which raises its own error also where a read takes too long."""
    import pg8000.legacy as pg8000

    class Connection(pg8000.Connection):  # type: ignore[misc]  # it has no types
        def handle_messages(self, context: Any) -> None:
            with _told():
                super().handle_messages(context)

        def close(self) -> None:
            with suppress(pg8000.InterfaceError):  # to a server that is gone, nothing can be said
                super().close()

    @contextmanager
    def _told() -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise pg8000.InterfaceError("network error") from error

    return _told()(Connection)


def remote_kind(url: URL) -> str | None:
    """The type of the network file system that holds a SQLite file, if one does."""
    return None if _is_in_memory(url) else remote_file_system(_folder(url))


def _is_in_memory(url: URL) -> bool:
    return not url.database or url.database == ":memory:"


def _folder(url: URL) -> Path:
    return Path(str(url.database)).absolute().parent

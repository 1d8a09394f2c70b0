"""A database: how connections are made and how long they wait, and transactions on them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, Engine, ExceptionContext, NullPool, create_engine, event
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    InvalidatePoolError,
    SQLAlchemyError,
)
from sqlalchemy.orm import Session

from bagua_autotune.store import migrations, sqlite
from bagua_autotune.store.direct import IS_DIRECT, Direct, Run, Statement
from bagua_autotune.store.errors import NoAnswer, NoDatabase, StoreError
from bagua_autotune.store.location import parse, shown, with_driver
from bagua_autotune.store.sqlite import BUSY_SECONDS, remote_kind

logger = logging.getLogger(__name__)

# Fewer than the threads that answer requests: some stay free while all of these wait.
CONNECTIONS = 12
CONNECTION_WAIT_SECONDS = 2.0
# Longer than the server lets a statement take, so that its own error message comes first.
ANSWER_SECONDS = 10.0
SERVER_LIMITS_SECONDS = {
    "statement_timeout": 8.0,
    "lock_timeout": 5.0,
    # Frees what a hanging replica has locked.
    "idle_in_transaction_session_timeout": 30.0,
}
# After a server gave no answer.
RETRY_SECONDS = 2.0

Answer = TypeVar("Answer")


class Database:
    """Transactions on one database, whose schema is created or upgraded when it is opened.

    Opened "as found" it is not changed: a service of an older release may be using it.

    Args:
        url: of SQLAlchemy.
        as_found: whether to refuse a database that does not exist or has another schema, instead
            of creating or upgrading it.

    Raises:
        NoDatabase: it is to be used as found, and its file does not exist.
        OtherSchema: the schema is newer, or older and cannot or must not be upgraded.
        StoreError: the URL is wrong, or the database cannot be reached or written.
    """

    def __init__(self, url: str, *, as_found: bool = False) -> None:
        self.url = with_driver(parse(url))
        self._views = threading.local()
        self._circuit = Circuit()
        self._writers = threading.Lock()
        if as_found and self.is_sqlite and not Path(str(self.url.database)).exists():
            raise NoDatabase(f"there is no database {self}; --database names another")
        try:
            files = None
            if self.is_sqlite:
                self._engine, files = sqlite.open_engine(self.url)
            else:
                self._engine = _server(self.url, self._circuit)
        except ImportError as error:
            raise StoreError(f"the database {self} needs a driver: {error}") from error
        except (OSError, ArgumentError) as error:
            raise StoreError(f"the database {self} cannot be opened: {error}") from error
        self._reader = self._engine.execution_options(read_only=True)
        self._listeners: list[Callable[[], None]] = []
        event.listen(self._engine, "handle_error", lambda _: self._doubt())
        self._direct = Direct(self._engine, self._failed, files)
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
        """Bring the schema up to date, without a server's time limits, as it may take minutes."""
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
                "the database %s is on a network file system (%s), so it is used without SQLite's "
                "write-ahead log; that is slower, and safe only if the file system's locks work; "
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
        """Open a transaction that reads one consistent view; nothing is written. Within one of the
        same thread it is that one.
        """
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
        """Open a transaction that writes; on SQLite writers take turns from its first
        statement on.
        """
        self._circuit.enter()
        with self._turn(), Session(self._engine) as session, session.begin():
            yield session

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """On SQLite, let the writers of this process take turns: waiting for SQLite's own lock they
        would sleep and retry, and leave the file idle meanwhile."""
        if not self.is_sqlite:
            yield
        elif not self._writers.acquire(timeout=BUSY_SECONDS):
            raise NoAnswer(f"other writers kept the database busy for {BUSY_SECONDS:g} s")
        else:
            try:
                yield
            finally:
                self._writers.release()

    def ask(self, statement: Statement, **values: Any) -> list[Any]:
        """The rows of one statement that reads; within ``reading`` of the same thread, of its
        view."""
        outer = getattr(self._views, "session", None)
        if outer is not None:
            return self._direct.within(outer.connection().connection, statement, values)
        self._circuit.enter()
        rows = self._direct.one(statement, values)
        self._circuit.answered()
        return rows

    def tell(self, statement: Statement, **values: Any) -> list[Any]:
        """Run one statement that writes, in a transaction of its own; its rows."""
        return self._write(lambda: self._direct.one(statement, values))

    def transact(self, work: Callable[[Run], Answer]) -> Answer:
        """Do the work in one transaction that writes; it may be done a second time (see direct)."""
        return self._write(lambda: self._direct.transaction(work))

    def _write(self, do: Callable[[], Answer]) -> Answer:
        self._circuit.enter()
        with self._turn():
            answer = do()
        self._circuit.answered()
        return answer

    def _failed(self, error: DBAPIError) -> None:
        if error.connection_invalidated:
            self._circuit.failed()
        self._doubt()

    def _doubt(self) -> None:
        for listener in self._listeners:
            listener()

    def on_error(self, listener: Callable[[], None]) -> None:
        """Call the listener when a statement or a commit fails."""
        self._listeners.append(listener)

    def close(self) -> None:
        self._engine.dispose()


class Circuit:
    """After a failure lets one request in RETRY_SECONDS through until one is answered, and refuses
    the others at once: they must not all wait for a server that does not answer.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._next_try: float | None = None

    def enter(self) -> None:
        """Raise NoAnswer unless the server may be asked now."""
        with self._lock:
            if self._next_try is None:
                return
            now = self._clock()
            if now < self._next_try:
                raise NoAnswer("the database gave no answer a moment ago")
            self._next_try = now + RETRY_SECONDS

    def answered(self) -> None:
        """The server answered."""
        if self._next_try is None:
            return
        with self._lock:
            self._next_try = None

    def failed(self) -> None:
        """The server could not be reached, or did not answer in time."""
        with self._lock:
            self._next_try = self._clock() + RETRY_SECONDS


def _server(url: URL, circuit: Circuit) -> Engine:
    """The engine of a server, with the time limits above; tells the circuit of failures.

    Raises ImportError if the URL's driver is missing, ArgumentError if SQLAlchemy knows none.
    """
    engine = create_engine(
        url,
        pool_size=CONNECTIONS,
        max_overflow=0,
        pool_timeout=CONNECTION_WAIT_SECONDS,
        # A hanging server closes no connection: only the socket's time limit ends the wait.
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
        # SQLite's transactions have one view from their first statement on; PostgreSQL's have it
        # only if asked for. Asked for by an execution option, SQLAlchemy would not notice a lost
        # connection, and would use it again.
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
    """Tell the circuit whether the engine's server answers."""

    @event.listens_for(engine, "checkout")
    def _checkout(connection: Any, _record: Any, _proxy: Any) -> None:
        if IS_DIRECT.get():
            return  # what is done there finds out by itself, and is done again
        try:
            connection.autocommit = True
            engine.dialect.do_ping(connection)
            connection.autocommit = False
        except engine.dialect.loaded_dbapi.Error as error:
            raise InvalidatePoolError from error  # all that lie there; a new one is made
        circuit.answered()

    @event.listens_for(engine, "handle_error")
    def _failed(context: ExceptionContext) -> None:
        could_not_connect = context.connection is None
        if could_not_connect or context.is_disconnect:
            circuit.failed()


def _pg8000_connect() -> Callable[..., Any]:
    """pg8000's connect, which here raises pg8000's error also when a read takes too long."""
    import pg8000.legacy as pg8000

    class Connection(pg8000.Connection):  # type: ignore[misc]  # it has no types
        def handle_messages(self, context: Any) -> None:
            with _told():
                super().handle_messages(context)

        def close(self) -> None:
            with suppress(pg8000.InterfaceError):  # the server is gone
                super().close()

    @contextmanager
    def _told() -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise pg8000.InterfaceError("network error") from error

    return _told()(Connection)

"""A database: transactions on it, and statements on the driver's own connections.

What SQLAlchemy's sessions do beside took, for each transaction, many times as long as the database.
So the requests that come most are carried out without them: SQLAlchemy compiles each statement
once, and its pool lends the connections. There values are the driver's: JSON is text.

A server's connection that was lost while it lay in the pool is noticed by its first statement then,
and the work is done once more on a new one. So it must be the same done twice: the first may have
been stored though its answer was lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Dialect, ExceptionContext, NullPool, create_engine, event
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session

from bagua_autotune.store.engine import migrations, postgresql, sqlite
from bagua_autotune.store.engine.location import parse, shown, with_driver
from bagua_autotune.store.engine.postgresql import IS_DIRECT, Circuit
from bagua_autotune.store.engine.reserve import Reserve
from bagua_autotune.store.engine.sqlite import BUSY_SECONDS, remote_kind
from bagua_autotune.store.errors import NoAnswer, NoDatabase, StoreError, remedy

logger = logging.getLogger(__name__)

# A connection that fails so quickly was lost before: the server does not hang.
QUICK_SECONDS = 1.0
# SQLite's transactions have one view from their first statement on; PostgreSQL's have it only if
# asked for. Asked for by an execution option, SQLAlchemy would not notice a lost connection, and
# would use it again. IMMEDIATE: what a writer reads first must still be true when it writes.
BEGIN_READING = {
    "sqlite": "BEGIN",
    "postgresql": "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY",
}
BEGIN_WRITING = {"sqlite": "BEGIN IMMEDIATE"}  # the other drivers do so by themselves

Answer = TypeVar("Answer")


class Statement:
    """A statement of SQLAlchemy whose parameters have names; compiled once for each driver."""

    def __init__(self, clause: Any) -> None:
        self._clause = clause
        self._compiled: dict[str, tuple[str, Mapping[str, Any]]] = {}
        named: Any = namedtuple
        names = [column.key for column in self._clause.exported_columns]
        self.make_row: Callable[[Any], Any] = named("Row", names, rename=True)._make

    def compiled(self, dialect: Dialect) -> tuple[str, Mapping[str, Any]]:
        """Its text, and the values that it has already."""
        found = self._compiled.get(dialect.driver)
        if found is None:
            style = "named" if dialect.driver in ("pysqlite", "pg8000") else "pyformat"
            of_driver: Any = type(dialect)
            made = self._clause.compile(dialect=of_driver(paramstyle=style))
            found = self._compiled[dialect.driver] = str(made), made.params
        return found


# Runs one statement, with its values by name, and returns its rows.
Run = Callable[..., list[Any]]


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
        self.errors = 0  # of statements, commits and connections so far
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
                self._engine = postgresql.open_engine(self.url, self._circuit)
        except ImportError as error:
            raise StoreError(f"the database {self} needs a driver: {error}") from error
        except (OSError, ArgumentError) as error:
            raise StoreError(f"the database {self} cannot be opened: {error}") from error
        self._check_files = files.check if files else lambda _lent: None
        self.reserve = Reserve(Path(str(self.url.database))) if files else None
        self._dialect: Any = self._engine.dialect
        self._driver_error: type[Exception] = self._dialect.loaded_dbapi.Error
        self._reader = self._engine.execution_options(read_only=True)
        event.listen(self._engine, "begin", self._begin)
        event.listen(self._engine, "handle_error", self._failed)
        try:
            self._prepare(as_found)
        except SQLAlchemyError as error:
            reason = error.args[0] if error.args else error
            raise StoreError(
                f"the database {self} cannot be used: {reason}; {remedy(error)}"
            ) from error
        if not as_found:
            self._warn_if_remote()
            if self.reserve is not None:
                self.reserve.keep()

    def _prepare(self, as_found: bool) -> None:
        """Check the schema, or bring it up to date. The first to read a file of SQLite makes its
        logs, for which there is no room on a full disk."""
        if self.reserve is not None and not self.reserve.has_room():
            with self.reserve.used():
                self._check_schema(as_found)
        else:
            self._check_schema(as_found)

    def _check_schema(self, as_found: bool) -> None:
        if as_found:
            migrations.check(self._reader)
        elif migrations.is_needed(self._reader):
            self._migrate()

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
        same thread it is that one."""
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
        statement on."""
        self._circuit.enter()
        with self._turn(), Session(self._engine) as session, session.begin():
            yield session

    def ask(self, statement: Statement, **values: Any) -> list[Any]:
        """The rows of one statement that reads; within ``reading`` of the same thread, of its
        view."""
        outer = getattr(self._views, "session", None)
        if outer is None:
            return self._lend(lambda lent: self._run(lent, statement, values))
        lent = outer.connection().connection
        with self._told(lent):
            return self._run(lent, statement, values)

    def tell(self, statement: Statement, **values: Any) -> list[Any]:
        """Run one statement that writes, in a transaction of its own; its rows."""
        with self._turn():
            return self._lend(lambda lent: self._run(lent, statement, values))

    def transact(self, work: Callable[[Run], Answer]) -> Answer:
        """Do the work in one transaction that writes; it may be done a second time."""

        def within(lent: Any) -> Answer:
            cursor = lent.cursor()
            cursor.execute(BEGIN_WRITING.get(self._dialect.name, "BEGIN"))
            try:
                answer = work(lambda statement, **values: self._run(lent, statement, values))
                cursor.execute("COMMIT")
            except BaseException:
                with suppress(self._driver_error):
                    cursor.execute("ROLLBACK")
                raise
            return answer

        with self._turn():
            return self._lend(within)

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

    def _run(self, lent: Any, statement: Statement, values: Mapping[str, Any]) -> list[Any]:
        """The statement's rows, on this connection, whatever transaction it is in."""
        text, constants = statement.compiled(self._dialect)
        given = {**constants, **values}
        if self._dialect.driver == "pg8000":
            prepared = lent.info.setdefault("prepared", {})
            if text not in prepared:
                prepared[text] = lent.dbapi_connection.prepare(text)
            found = prepared[text].run(**given)
            # The driver would keep these rows until the connection runs the statement again.
            prepared[text]._context = None
            return [statement.make_row(row) for row in found]
        cursor = lent.dbapi_connection.cursor()
        cursor.execute(text, given)
        return [statement.make_row(row) for row in cursor.fetchall()] if cursor.description else []

    def _lend(self, work: Callable[[Any], Answer], is_again: bool = False) -> Answer:
        """Do the work on a connection, and once more if that was lost before."""
        if not is_again:
            self._circuit.enter()
        began = time.monotonic()
        try:
            answer = self._lend_once(work)
        except DBAPIError as error:
            is_quick = time.monotonic() - began < QUICK_SECONDS
            if error.connection_invalidated and is_quick and not is_again:
                self._engine.dispose()  # the others are as old
                return self._lend(work, is_again=True)
            if error.connection_invalidated and not self.is_sqlite:
                self._circuit.failed()
            raise
        self._circuit.answered()
        return answer

    def _lend_once(self, work: Callable[[Any], Answer]) -> Answer:
        outside = IS_DIRECT.set(True)
        try:
            with self._told(None):
                lent = self._engine.raw_connection()
        finally:
            IS_DIRECT.reset(outside)
        connection: Any = lent.dbapi_connection
        try:
            with self._told(lent):
                if not self.is_sqlite:
                    connection.autocommit = True  # the driver begins no transaction by itself
                self._check_files(lent)
                answer = work(lent)
                self._check_files(lent)
                return answer
        except DBAPIError as error:
            if not self.is_sqlite:
                lent.invalidate(error)
            raise
        finally:
            if not self.is_sqlite and lent.is_valid:
                connection.autocommit = False
            lent.close()

    @contextmanager
    def _told(self, lent: Any) -> Iterator[None]:
        """Tell the driver's errors as SQLAlchemy's; without a connection, it could not be made."""
        try:
            yield
        except self._driver_error as error:
            self.errors += 1
            connection = lent and lent.dbapi_connection
            is_lost = lent is None or self._dialect.is_disconnect(error, connection, None)
            raise DBAPIError.instance(
                *(None, None, error, self._driver_error),
                connection_invalidated=is_lost,
                dialect=self._dialect,
            ) from error

    def _begin(self, connection: Connection) -> None:
        is_view = connection.get_execution_options().get("read_only")
        begin = (BEGIN_READING if is_view else BEGIN_WRITING).get(self._dialect.name)
        if begin:
            connection.exec_driver_sql(begin)

    def _failed(self, context: ExceptionContext) -> None:
        self.errors += 1
        if not self.is_sqlite and (context.connection is None or context.is_disconnect):
            self._circuit.failed()

    @contextmanager
    def making_room(self) -> Iterator[None]:
        """Have the block delete, also on a full disk: of a file of SQLite it has the reserve."""
        with self.reserve.used() if self.reserve else nullcontext():
            yield

    def empty_log(self) -> None:
        """Give the room of SQLite's log back, unless somebody uses it now."""
        with self._turn():
            self._lend(lambda lent: sqlite.empty_log(lent.driver_connection))

    def close(self) -> None:
        self._engine.dispose()

"""A database: the one way to its rows.

SQLAlchemy builds the statements, compiles each once, and lends the connections. They run on the
driver's own cursors: what SQLAlchemy does beside took, for each transaction, many times as long as
the database. Values are Python's: what is JSON in a row is a dict or a list.

A server's connection that was lost while it lay in the pool is noticed by its first statement,
which a new one then runs again. So a statement that is a transaction of its own must be the same
done twice: the first may have been stored though its answer was lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

from sqlalchemy import JSON, Executable, Float, NullPool, create_engine, text
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from bagua_autotune.store.engine import migrations, postgresql, sqlite
from bagua_autotune.store.engine.location import parse, shown, with_driver
from bagua_autotune.store.engine.postgresql import Circuit
from bagua_autotune.store.engine.sqlite import BUSY_SECONDS, Reserve, remote_kind
from bagua_autotune.store.errors import NoAnswer, NoDatabase, StoreError, remedy

logger = logging.getLogger(__name__)

# A connection that fails so quickly was lost before: the server does not hang.
QUICK_SECONDS = 1.0
# Runs one statement, with its values by name, and returns its rows.
Run = Callable[..., list[Any]]


class Compiled:
    """A statement as one driver takes it, by the names of its parameters."""

    def __init__(self, statement: Any, dialect: Any) -> None:
        style = "named" if dialect.driver in ("pysqlite", "pg8000") else "pyformat"
        made = statement.compile(
            dialect=type(dialect)(paramstyle=style), compile_kwargs={"render_postcompile": True}
        )
        columns = list(getattr(statement, "exported_columns", ()))
        self.text, self.uses = str(made), 0  # a constant of a module is used again
        self._constants = made.params
        # A number needs no processing. A driver may know JSON by itself.
        self._write = [
            (name, process)
            for each, name in made.bind_names.items()
            if not isinstance(each.type, Float)
            and (process := each.type.dialect_impl(dialect).bind_processor(dialect))
        ]
        self._read = [
            (place, process)
            for place, column in enumerate(columns)
            if isinstance(column.type, JSON)
            and (process := column.type.dialect_impl(dialect).result_processor(dialect, None))
        ]
        named: Any = namedtuple
        names = [column.key for column in columns]
        self._make_row = named("Row", names, rename=True)._make if columns else tuple

    def given(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """All values, also those that it has already."""
        found = {**self._constants, **values}
        for name, process in self._write:
            found[name] = process(found[name])
        return found

    def rows(self, found: Iterable[Any]) -> list[Any]:
        """The driver's rows, by the names of their columns."""
        for place, process in self._read:
            found = [[*row[:place], process(row[place]), *row[place + 1 :]] for row in found]
        return list(map(self._make_row, found))


_compiled: WeakKeyDictionary[Executable, dict[str, Compiled]] = WeakKeyDictionary()
# SQLite's transactions have one view from their first statement on.
BEGIN_READING = {"postgresql": text("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")}
# IMMEDIATE: what a writer reads first must still be true when it writes.
BEGIN_WRITING = {"sqlite": text("BEGIN IMMEDIATE")}
BEGIN, COMMIT, NOTHING = text("BEGIN"), text("COMMIT"), text("SELECT 1")


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
                self._engine = postgresql.open_engine(self.url)
        except ImportError as error:
            raise StoreError(f"the database {self} needs a driver: {error}") from error
        except (OSError, ArgumentError) as error:
            raise StoreError(f"the database {self} cannot be opened: {error}") from error
        self._check_files = files.check if files else lambda _lent: None
        self.reserve = Reserve(Path(str(self.url.database))) if files else None
        self._dialect: Any = self._engine.dialect
        self._driver_error: type[Exception] = self._dialect.loaded_dbapi.Error
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
            migrations.check(self._engine)
        elif migrations.is_needed(self._engine):
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

    def read(self, statement: Executable, /, **values: Any) -> list[Any]:
        """The rows of one statement that reads; within ``reading`` of the same thread, of its
        view."""
        view: Run | None = getattr(self._views, "run", None)
        return self._alone(statement, values) if view is None else view(statement, **values)

    def write(self, statement: Executable, /, **values: Any) -> list[Any]:
        """Run one statement that writes, in a transaction of its own; its rows."""
        with self._turn():
            return self._alone(statement, values)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Have ``read`` in this block, of the same thread, see one consistent view. A block within
        another has that one's."""
        if getattr(self._views, "run", None) is not None:
            yield
            return
        with self._transaction(BEGIN_READING.get(self._dialect.name, BEGIN)) as run:
            self._views.run = run
            try:
                yield
            finally:
                self._views.run = None

    @contextmanager
    def writing(self) -> Iterator[Run]:
        """Open a transaction that writes; on SQLite writers take turns."""
        with self._turn(), self._transaction(BEGIN_WRITING.get(self._dialect.name, BEGIN)) as run:
            yield run

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

    def _alone(self, statement: Executable, values: Mapping[str, Any]) -> list[Any]:
        with self._lent(statement, values) as (lent, found):
            self._check_files(lent)
            return found

    @contextmanager
    def _transaction(self, begin: Executable) -> Iterator[Run]:
        """What is not committed is rolled back by the pool, to which the connection returns."""
        with self._lent(begin, {}) as (lent, _):
            yield partial(self._run, lent)
            self._check_files(lent)
            self._run(lent, COMMIT)

    @contextmanager
    def _lent(
        self, first: Executable, values: Mapping[str, Any]
    ) -> Iterator[tuple[Any, list[Any]]]:
        """A connection that has run this statement, and the rows of it."""
        self._circuit.enter()
        try:
            lent, found = self._begun(first, values)
            self._circuit.answered()
            try:
                yield lent, found
            except DBAPIError as error:
                self._give_up(lent, error)
                raise
            finally:
                lent.close()
        except DBAPIError as error:
            if error.connection_invalidated and not self.is_sqlite:
                self._circuit.failed()
            raise

    def _begun(self, first: Executable, values: Mapping[str, Any]) -> tuple[Any, list[Any]]:
        began = time.monotonic()
        try:
            return self._begun_once(first, values)
        except DBAPIError as error:
            if not error.connection_invalidated or time.monotonic() - began > QUICK_SECONDS:
                raise
        self._engine.dispose()  # the others are as old
        return self._begun_once(first, values)

    def _begun_once(self, first: Executable, values: Mapping[str, Any]) -> tuple[Any, list[Any]]:
        try:
            lent = self._engine.raw_connection()
        except self._driver_error as error:
            raise self._told(error, None) from error
        try:
            self._check_files(lent)
            return lent, self._run(lent, first, **values)
        except BaseException as error:
            self._give_up(lent, error)
            lent.close()
            raise

    def _run(self, lent: Any, statement: Executable, /, **values: Any) -> list[Any]:
        """The statement's rows, on this connection, whatever transaction it is in."""
        made = self._made(statement)
        given = made.given(values)
        try:
            if self._dialect.driver == "pg8000":
                found = postgresql.run_pg8000(lent, made.text, given, is_kept=made.uses > 1)
            else:
                cursor = lent.dbapi_connection.cursor()
                cursor.execute(made.text, given)
                found = cursor.fetchall() if self.is_sqlite or cursor.description else ()
        except self._driver_error as error:
            raise self._told(error, lent) from error
        return made.rows(found)

    def _made(self, statement: Executable) -> Compiled:
        """The statement, compiled once for each driver."""
        by_driver = _compiled.setdefault(statement, {})
        if self._dialect.driver not in by_driver:
            by_driver[self._dialect.driver] = Compiled(statement, self._dialect)
        made = by_driver[self._dialect.driver]
        made.uses += 1
        return made

    def _told(self, error: Exception, lent: Any) -> DBAPIError:
        """The driver's error as SQLAlchemy's; without a connection, it could not be made."""
        self.errors += 1
        connection = lent and lent.dbapi_connection
        is_lost = lent is None or self._dialect.is_disconnect(error, connection, None)
        told = DBAPIError.instance(
            *(None, None, error, self._driver_error),
            connection_invalidated=is_lost,
            dialect=self._dialect,
        )
        return cast(DBAPIError, told)

    def _give_up(self, lent: Any, error: BaseException) -> None:
        """Let a server's connection go that met an error, with what it began."""
        if isinstance(error, DBAPIError) and not self.is_sqlite:
            lent.invalidate(error)

    @contextmanager
    def making_room(self) -> Iterator[None]:
        """Have the block delete, also on a full disk: of a file of SQLite it has the reserve."""
        with self.reserve.used() if self.reserve else nullcontext():
            yield

    def shrink(self) -> None:
        """Give the unused room of a SQLite file back to the file system, piece by piece."""
        if not self.is_sqlite:
            return
        while True:
            with self.writing() as run:
                unused, left = sqlite.vacuum(run)
            if left in (0, unused):  # made by another program, a file may never shrink
                break
        with self._turn(), self._lent(NOTHING, {}) as (lent, _):
            sqlite.empty_log(lent.driver_connection)

    def close(self) -> None:
        self._engine.dispose()

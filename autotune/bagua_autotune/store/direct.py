"""The statements of the requests that come most, on the driver's own connections.

SQLAlchemy compiles each statement once and its pool lends the connections. What it does beside, for
each transaction, took many times as long as the database. Values are the driver's: JSON is text.

A server's connection that was lost while it lay in the pool is noticed by its first statement. Then
the work is done once more on a new one. So it must be the same done twice: the first may have been
stored though its answer was lost.
"""

from __future__ import annotations

import time
from collections import namedtuple
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from sqlalchemy import Dialect, Engine, PoolProxiedConnection
from sqlalchemy.exc import DBAPIError

from bagua_autotune.store.files import Files

Answer = TypeVar("Answer")
# A connection that fails so quickly was lost before: the server does not hang.
QUICK_SECONDS = 1.0
PREPARED = "prepared"
# Of the thread that asks the pool for a connection.
IS_DIRECT = ContextVar("IS_DIRECT", default=False)


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
            style = "pyformat" if dialect.driver == "psycopg" else "named"
            of_driver: Any = type(dialect)
            made = self._clause.compile(dialect=of_driver(paramstyle=style))
            found = self._compiled[dialect.driver] = str(made), made.params
        return found


class Run(Protocol):
    """Runs one statement, and returns its rows."""

    def __call__(self, statement: Statement, **values: Any) -> list[Any]: ...


class Direct:
    """Work on the engine's connections.

    Args:
        failed: is told of each error.
        files: of SQLite, which must still be there before and after a transaction.
    """

    def __init__(
        self,
        engine: Engine,
        failed: Callable[[DBAPIError], None],
        files: Files | None,
    ) -> None:
        self._engine = engine
        self._dialect: Any = engine.dialect
        self._is_sqlite = self._dialect.name == "sqlite"
        self._check = files.check if files else lambda _lent: None
        self._failed = failed
        self._errors: type[Exception] = self._dialect.loaded_dbapi.Error

    def one(self, statement: Statement, values: Mapping[str, Any]) -> list[Any]:
        """The rows of a statement that is a transaction of its own."""
        return self._lend(lambda lent: self.run(lent, statement, values))

    def within(
        self, lent: PoolProxiedConnection, statement: Statement, values: Mapping[str, Any]
    ) -> list[Any]:
        """The rows of a statement in the transaction that this connection of SQLAlchemy's is in."""
        try:
            return self.run(lent, statement, values)
        except self._errors as error:
            is_lost = self._dialect.is_disconnect(error, lent.dbapi_connection, None)
            raise self._told(error, is_lost) from error

    def transaction(self, work: Callable[[Run], Answer]) -> Answer:
        """What the work returns, whose statements are one transaction that writes."""

        def within(lent: PoolProxiedConnection) -> Answer:
            connection: Any = lent
            cursor = connection.cursor()
            cursor.execute("BEGIN IMMEDIATE" if self._is_sqlite else "BEGIN")
            try:
                answer = work(lambda statement, **values: self.run(lent, statement, values))
                cursor.execute("COMMIT")
            except BaseException:
                with suppress(self._errors):
                    cursor.execute("ROLLBACK")
                raise
            return answer

        return self._lend(within)

    def run(
        self, lent: PoolProxiedConnection, statement: Statement, values: Mapping[str, Any]
    ) -> list[Any]:
        """The statement's rows, on this connection, whatever transaction it is in."""
        text, constants = statement.compiled(self._dialect)
        given = {**constants, **values} if constants else dict(values)
        connection: Any = lent.dbapi_connection
        if self._dialect.driver == "pg8000":
            prepared = lent.info.setdefault(PREPARED, {})
            if text not in prepared:
                prepared[text] = connection.prepare(text)
            found = prepared[text].run(**given)
        else:
            cursor = connection.cursor()
            cursor.execute(text, given)
            found = cursor.fetchall() if cursor.description else ()
        return [statement.make_row(row) for row in found]

    def _lend(self, work: Callable[[PoolProxiedConnection], Answer]) -> Answer:
        try:
            return self._lend_once(work, time.monotonic())
        except _LostEarlier:
            self._engine.dispose()  # the others are as old
            return self._lend_once(work)

    def _lend_once(
        self, work: Callable[[PoolProxiedConnection], Answer], since: float | None = None
    ) -> Answer:
        outside = IS_DIRECT.set(True)
        try:
            lent = self._engine.raw_connection()
        except self._errors as error:
            raise self._told(error, is_lost=True) from error
        finally:
            IS_DIRECT.reset(outside)
        connection: Any = lent.dbapi_connection
        try:
            if not self._is_sqlite:
                connection.autocommit = True  # the driver begins no transaction by itself
            self._check(lent)
            answer = work(lent)
            self._check(lent)
            return answer
        except self._errors as error:
            is_lost = self._dialect.is_disconnect(error, connection, None)
            if not self._is_sqlite:
                lent.invalidate(error)
            if is_lost and since is not None and time.monotonic() - since < QUICK_SECONDS:
                raise _LostEarlier from error
            raise self._told(error, is_lost) from error
        finally:
            if not self._is_sqlite and lent.is_valid:
                connection.autocommit = False
            lent.close()

    def _told(self, error: Exception, is_lost: bool) -> DBAPIError:
        """The error as SQLAlchemy has it."""
        told = DBAPIError.instance(
            None, None, error, self._errors, connection_invalidated=is_lost, dialect=self._dialect
        )
        assert isinstance(told, DBAPIError)
        self._failed(told)
        return told


class _LostEarlier(Exception):
    """The connection was lost before it was lent."""

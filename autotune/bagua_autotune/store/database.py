"""Opening a database: engine and transactions."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Engine, QueuePool, create_engine, event
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.orm import Session

from bagua_autotune.store import migrations
from bagua_autotune.store.errors import StoreError
from bagua_autotune.store.location import remote_file_system
from bagua_autotune.store.url import parse, shown

logger = logging.getLogger(__name__)

SQLITE_BUSY_SECONDS = 30.0
WRITE_AHEAD_LOG = ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = NORMAL")
ROLLBACK_JOURNAL = ("PRAGMA journal_mode = DELETE", "PRAGMA synchronous = FULL")


class Database:
    """Transactions on one database, whose schema is created or brought up as it is opened.

    Whoever opens it as found changes nothing, as a service of an older release may be using it.

    Args:
        url: of SQLAlchemy.
        as_found: whether to refuse a database that is not there or has not the schema of this
            release, not make or change it.

    Raises:
        OtherSchema: newer schema, or an older one that cannot be brought up or must not.
        StoreError: bad URL, missing driver, unreachable or unwritable.
    """

    def __init__(self, url: str, *, as_found: bool = False) -> None:
        self.url = parse(url)
        self._views = threading.local()
        if as_found and self._is_sqlite and not Path(str(self.url.database)).exists():
            raise StoreError(f"there is no database {self}; --database names another")
        try:
            self._engine = _sqlite(self.url) if self._is_sqlite else _server(self.url)
        except ImportError as error:
            raise StoreError(f"the database {self} needs a driver: {error}") from error
        except (OSError, ArgumentError) as error:
            raise StoreError(f"the database {self} cannot be opened: {error}") from error
        self._reader = self._engine.execution_options(read_only=True)
        try:
            if as_found:
                migrations.check(self._reader)
            else:
                migrations.prepare(self._engine)
        except SQLAlchemyError as error:
            reason = error.args[0] if error.args else error
            raise StoreError(f"the database {self} cannot be used: {reason}") from error
        if self._is_sqlite and not as_found:
            _warn_if_remote(self.url)

    def __str__(self) -> str:
        return shown(self.url)

    @property
    def _is_sqlite(self) -> bool:
        return self.url.get_backend_name() == "sqlite"

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """One consistent view; nothing is written. A thread's inner one is the outer one's."""
        outer = getattr(self._views, "session", None)
        if outer is not None:
            yield outer
            return
        with Session(self._reader) as session, session.begin():
            self._views.session = session
            try:
                yield session
            finally:
                self._views.session = None

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """One transaction; on SQLite writers take turns from its first statement on."""
        with Session(self._engine) as session, session.begin():
            yield session

    def close(self) -> None:
        self._engine.dispose()


def _server(url: URL) -> Engine:
    engine = create_engine(url)

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


def _sqlite(url: URL) -> Engine:
    options: dict[str, Any] = {}
    journal: tuple[str, ...] = ()
    is_remote = False
    if _is_in_memory(url):
        # A memory database lives in its connection: one for all threads, which take turns.
        options = {"poolclass": QueuePool, "pool_size": 1, "max_overflow": 0}
    else:
        _folder(url).mkdir(parents=True, exist_ok=True)
        is_remote = remote_file_system(_folder(url)) is not None
        journal = ROLLBACK_JOURNAL if is_remote else WRITE_AHEAD_LOG
    arguments = {"check_same_thread": False, "timeout": SQLITE_BUSY_SECONDS}
    engine = create_engine(url, connect_args=arguments, **options)

    @event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: Any) -> None:
        # The driver would begin transactions by itself, and too late: see _begin.
        connection.isolation_level = None
        connection.execute("PRAGMA foreign_keys = ON")
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


def _is_in_memory(url: URL) -> bool:
    return not url.database or url.database == ":memory:"


def _folder(url: URL) -> Path:
    return Path(str(url.database)).absolute().parent


def _warn_if_remote(url: URL) -> None:
    kind = None if _is_in_memory(url) else remote_file_system(_folder(url))
    if kind is not None:
        logger.warning(
            "the database %s is on a network file system (%s): it is used without SQLite's "
            "write-ahead log, which is slower, and safe only where that system's locks are; "
            "a folder of this machine, or PostgreSQL, is better",
            *(shown(url), kind),
        )

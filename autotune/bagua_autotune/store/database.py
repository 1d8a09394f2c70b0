"""Opening a database: engine and transactions."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import NullPool, create_engine
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.orm import Session

from bagua_autotune.store import engines, migrations
from bagua_autotune.store.circuit import Circuit
from bagua_autotune.store.errors import StoreError
from bagua_autotune.store.url import parse, shown

logger = logging.getLogger(__name__)


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
        self._circuit = Circuit()
        if as_found and self.is_sqlite and not Path(str(self.url.database)).exists():
            raise StoreError(f"there is no database {self}; --database names another")
        try:
            if self.is_sqlite:
                self._engine = engines.sqlite(self.url)
            else:
                self._engine = engines.server(self.url, self._circuit)
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
        kind = engines.remote_kind(self.url) if self.is_sqlite else None
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
        with Session(self._engine) as session, session.begin():
            yield session

    def close(self) -> None:
        self._engine.dispose()

"""SQLite's engine: its journal, its locks, and a file that stays where it was opened."""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Engine, QueuePool, create_engine, event

from bagua_autotune.store.files import Files
from bagua_autotune.store.location import is_in_memory, make_folder, remote_file_system

BUSY_SECONDS = 30.0
WRITE_AHEAD_LOG = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = NORMAL",
    # In bytes; the log shrinks to this after a large write.
    "PRAGMA journal_size_limit = 67108864",
)
ROLLBACK_JOURNAL = ("PRAGMA journal_mode = DELETE", "PRAGMA synchronous = FULL")


def open_engine(url: URL) -> tuple[Engine, Files | None]:
    """The engine of a file, whose folder is made, or in memory; and its file. Raises OSError if it
    cannot be opened."""
    options: dict[str, Any] = {}
    journal: tuple[str, ...] = ()
    is_remote = False
    if is_in_memory(url):
        # A memory database lives in its connection, which all threads share in turn.
        options = {"poolclass": QueuePool, "pool_size": 1, "max_overflow": 0}
    else:
        make_folder(_folder(url))
        is_remote = remote_kind(url) is not None
        journal = ROLLBACK_JOURNAL if is_remote else WRITE_AHEAD_LOG
    arguments = {"check_same_thread": False, "timeout": BUSY_SECONDS}
    engine = create_engine(url, connect_args=arguments, **options)

    @event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: Any) -> None:
        # The driver would begin transactions by itself, but too late: see database.
        connection.isolation_level = None
        connection.execute("PRAGMA foreign_keys = ON")
        if connection.execute("PRAGMA page_count").fetchone() == (0,):
            # Only a file that is created so can give unused space back.
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        for pragma in journal:
            # It fails where another process sets the mode now, or uses the file in its older mode.
            # Either is fine: the file keeps its mode.
            with suppress(sqlite3.OperationalError):
                connection.execute(pragma)
        if is_remote and connection.execute("PRAGMA journal_mode").fetchone() == ("wal",):
            raise sqlite3.OperationalError(
                "it is on a network file system, and another process uses it with a write-ahead "
                "log, which may corrupt it there; end that process first"
            )

    files = None if is_in_memory(url) else Files(Path(str(url.database)))
    if files is not None:
        files.watch(engine)

    return engine, files


def remote_kind(url: URL) -> str | None:
    """The type of the network file system that holds a SQLite file, if one does."""
    return None if is_in_memory(url) else remote_file_system(_folder(url))


def _folder(url: URL) -> Path:
    return Path(str(url.database)).absolute().parent

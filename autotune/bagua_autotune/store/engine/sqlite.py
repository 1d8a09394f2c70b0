"""SQLite's engine: its journal, its locks, a file that stays where it was opened, and all else of
which SQLAlchemy knows nothing: what SQLite is told by PRAGMA.

A file that was deleted or replaced can be written to as before, but nobody finds what is written:
it is gone with the process. So each transaction compares device and inode before it begins and
before it is committed.

SQLite writes to its log before anything is gone, also what it deletes: on a full disk nothing could
be deleted any more. So a file beside the database takes a little room, which whoever deletes has.
"""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    PoolProxiedConnection,
    QueuePool,
    create_engine,
    event,
    text,
)

from bagua_autotune.store.engine.location import (
    FILE_MODE,
    is_in_memory,
    make_folder,
    remote_file_system,
)
from bagua_autotune.store.errors import FileLost

ENDING = "-reserve"
# Of a small disk it is less.
RESERVE_BYTES = 8 * 1024**2
LARGEST_SHARE = 4
# What SQLite's log holds may need as much again in the database, before the log can be emptied; and
# what deletes comes on top.
LOG_SHARE = 2
# A small write may still fit into SQLite's log when no report does any more.
ROOM_BYTES = 1024**2


class Reserve:
    """The room beside one database that is kept for deleting.

    Args:
        database: its file.
    """

    def __init__(self, database: Path) -> None:
        self._folder = database.resolve().parent
        self._file = self._folder / f"{database.resolve().name}{ENDING}"

    def keep(self) -> None:
        """Take the room, or of it what is there."""
        if not hasattr(os, "posix_fallocate"):  # macOS
            return
        with suppress(OSError):  # the folder is read-only, or the last room was taken meanwhile
            handle = os.open(self._file, os.O_CREAT | os.O_WRONLY, FILE_MODE)
            with os.fdopen(handle, "wb") as opened:
                before = os.fstat(handle).st_size
                wanted = min(
                    _most_bytes(self._folder), before + shutil.disk_usage(self._folder).free
                )
                if wanted > before:
                    os.posix_fallocate(opened.fileno(), 0, wanted)

    def give_up(self) -> None:
        """Leave the room to others."""
        with suppress(OSError):
            self._file.unlink(missing_ok=True)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Leave the room to the block, and take it again afterwards."""
        self.give_up()
        try:
            yield
        finally:
            self.keep()

    def has_room(self) -> bool:
        """Whether more than a little can be stored beside it."""
        if not hasattr(os, "posix_fallocate"):
            return True
        try:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                os.posix_fallocate(file.fileno(), 0, ROOM_BYTES)
        except OSError as error:
            # Any other failure is the folder's, not the disk's.
            return error.errno not in (errno.ENOSPC, errno.EDQUOT)
        return True


def log_bytes(database: Path) -> int:
    """How much the log of a database may hold before what it holds is put into the file."""
    return _most_bytes(database.resolve().parent) // LOG_SHARE


def _most_bytes(folder: Path) -> int:
    return min(RESERVE_BYTES, shutil.disk_usage(folder).total // LARGEST_SHARE)


UNUSED = text("PRAGMA freelist_count")
VACUUM = text("PRAGMA incremental_vacuum(100)")
FileId = tuple[int, int]
# SQLite opens both with a connection, and keeps them while one is open.
LOGS = ("-wal", "-shm")
LOG_IDS = "file_ids_of_logs"
PAGE_BYTES = 4096
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
        pages = log_bytes(Path(str(url.database))) // PAGE_BYTES
        log = (*WRITE_AHEAD_LOG, f"PRAGMA wal_autocheckpoint = {pages}")
        journal = ROLLBACK_JOURNAL if is_remote else log
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

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:  # of migrations, which SQLAlchemy runs
        is_view = connection.get_execution_options().get("read_only")
        connection.exec_driver_sql("BEGIN" if is_view else "BEGIN IMMEDIATE")

    files = None if is_in_memory(url) else Files(Path(str(url.database)))
    if files is not None:
        files.watch(engine)

    return engine, files


def remote_kind(url: URL) -> str | None:
    """The type of the network file system that holds a SQLite file, if one does."""
    return None if is_in_memory(url) else remote_file_system(_folder(url))


def _folder(url: URL) -> Path:
    return Path(str(url.database)).absolute().parent


class Files:
    """The file of a database and its logs.

    Args:
        path: of the database; made, if it is missing, for this user alone.
    """

    def __init__(self, path: Path) -> None:
        self._path = str(path.resolve())
        self._logs = {log: self._path + log for log in LOGS}
        self._file: FileId | None = None

    def watch(self, engine: Engine) -> None:
        """Make transactions fail with FileLost if the file was moved or deleted: nobody would find
        the data."""

        @event.listens_for(engine, "do_connect")
        def _before(*_: Any) -> None:
            if self._file is None:
                with suppress(OSError):  # it exists, or SQLite will say what is wrong
                    os.close(os.open(self._path, os.O_CREAT | os.O_EXCL, FILE_MODE))
                self._file = _id_of(self._path)
            self._check_file()  # SQLite would make another

        @event.listens_for(engine, "connect")
        def _connected(connection: Any, record: Any) -> None:
            connection.execute("SELECT COUNT(*) FROM sqlite_master")  # opens the logs
            record.info[LOG_IDS] = {
                log: found for log, path in self._logs.items() if (found := _id_of(path))
            }
            self._check_file()

    def check(self, lent: PoolProxiedConnection) -> None:
        """Raise FileLost if the connection writes where nobody reads."""
        try:
            self._check_file()
        except FileLost:
            # The log of a file that was moved is no other's, but SQLite would replay it over a file
            # that takes the place of this one.
            empty_log(cast(sqlite3.Connection, lent.driver_connection))
            raise
        for log, opened in lent.info[LOG_IDS].items():
            if _id_of(self._logs[log]) != opened:
                raise FileLost(
                    f"the log {self._logs[log]} of the database was deleted or replaced while it "
                    "was used: stop the service, which then still stores what it knows, and start "
                    "it again"
                )

    def _check_file(self) -> None:
        found = _id_of(self._path)
        if self._file is None or found == self._file:
            return
        if found is None:
            raise FileLost(
                f"the database {self._path} was deleted or moved while it was used: put it back, "
                "or restart the service to begin with an empty one"
            )
        raise FileLost(
            f"the database {self._path} was replaced while it was used: restart the service to "
            "use the new one"
        )


def empty_log(connection: sqlite3.Connection) -> None:
    """Put what is in the write-ahead log into the file, and take its room from it, if that can be
    done at once."""
    with suppress(sqlite3.Error):  # no room; or somebody reads, and the next one tries it
        (wait,) = connection.execute("PRAGMA busy_timeout").fetchone()
        connection.execute("PRAGMA busy_timeout = 0")
        try:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        finally:
            connection.execute(f"PRAGMA busy_timeout = {wait}")


def vacuum(run: Callable[..., list[Any]]) -> tuple[int, int]:
    """Give some of the pages that are unused back to the file system; how many were before, and are
    left. They are few, as SQLite writes them to its log first."""
    ((unused,),) = run(UNUSED)
    run(VACUUM)
    ((left,),) = run(UNUSED)
    return unused, left


def look_over(
    read: Callable[..., list[Any]], most_errors: int
) -> tuple[list[str], Counter[str], str]:
    """What SQLite itself finds: the errors of its integrity check, rows by table that belong to
    others that do not exist, and the journal mode."""
    errors = [str(row[0]) for row in read(text(f"PRAGMA integrity_check({most_errors})"))]
    orphans = Counter(str(row[0]) for row in read(text("PRAGMA foreign_key_check")))
    ((mode,),) = read(text("PRAGMA journal_mode"))
    return [] if errors == ["ok"] else errors, orphans, mode


def _id_of(path: str) -> FileId | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino

"""Whether the files of a SQLite database are still those that this process has open.

A file that was deleted or replaced can be written to as before, but nobody finds what is written:
it is gone with the process. So each transaction compares device and inode before it begins and
before it is committed.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from sqlalchemy import Engine, PoolProxiedConnection, event

from bagua_autotune.store.errors import FileLost
from bagua_autotune.store.location import FILE_MODE

FileId = tuple[int, int]
# SQLite opens both with a connection, and keeps them while one is open.
LOGS = ("-wal", "-shm")
LOG_IDS = "file_ids_of_logs"


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
        the data.
        """

        @event.listens_for(engine, "do_connect")
        def _before(*_: Any) -> None:
            if self._file is None:
                self._make()
                self._file = _id_of(self._path)
            self._check_file()  # SQLite would make another

        @event.listens_for(engine, "connect")
        def _connected(connection: Any, record: Any) -> None:
            connection.execute("SELECT COUNT(*) FROM sqlite_master")  # opens the logs
            record.info[LOG_IDS] = {
                log: found for log, path in self._logs.items() if (found := _id_of(path))
            }
            self._check_file()

        @event.listens_for(engine, "begin")
        def _begin(connection: Any) -> None:
            self.check(connection.connection)

        @event.listens_for(engine, "commit")
        def _commit(connection: Any) -> None:
            self._check(connection.info)

    def check(self, lent: PoolProxiedConnection) -> None:
        """Raise FileLost if the connection, in no transaction, writes where nobody reads."""
        try:
            self._check(lent.info)
        except FileLost:
            self._empty_log(cast(sqlite3.Connection, lent.driver_connection))
            raise

    def _make(self) -> None:
        with suppress(OSError):  # it exists, or SQLite will say what is wrong
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL, FILE_MODE))

    def _check(self, info: dict[str, Any]) -> None:
        self._check_file()
        for log, opened in info[LOG_IDS].items():
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

    def _empty_log(self, connection: sqlite3.Connection) -> None:
        """Put the log of a file that was moved into that file: it belongs to no other, but SQLite
        would replay it over a file that takes the place of this one."""
        if _id_of(self._path) == self._file:
            return  # who opened the file since has another log, and knows nothing of this one
        with suppress(sqlite3.Error):  # no room; or somebody reads, and the next request tries it
            (wait,) = connection.execute("PRAGMA busy_timeout").fetchone()
            connection.execute("PRAGMA busy_timeout = 0")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            connection.execute(f"PRAGMA busy_timeout = {wait}")


def _id_of(path: str) -> FileId | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino

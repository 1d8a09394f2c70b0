"""Whether a database can be written: tried from time to time, and after each failure."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import update

from bagua_autotune.store.engine.database import Database
from bagua_autotune.store.engine.location import is_in_memory
from bagua_autotune.store.engine.tables import SchemaRow
from bagua_autotune.store.errors import DiskFull

TRY_SECONDS = 10.0
# A small write may still fit into SQLite's log when no report does any more.
ROOM_BYTES = 1024**2


class Writable:
    """Tries a database.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, database: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._clock = clock
        self._shown_until = clock()
        self._errors = 0  # of the database, when it was tried last

    def check(self) -> None:
        """Raise SQLAlchemyError if nothing can be written, as found out a moment ago or now."""
        now = self._clock()
        if now < self._shown_until and self._errors == self._database.errors:
            return
        self._errors = self._database.errors
        with self._database.writing() as session:
            # The value that it has: all that counts is that it is written.
            session.execute(update(SchemaRow).values(version=SchemaRow.version))
        if self._database.is_sqlite and not is_in_memory(self._database.url):
            _check_room(Path(str(self._database.url.database)).absolute().parent)
        self._shown_until = now + TRY_SECONDS


def _check_room(folder: Path) -> None:
    """Raise DiskFull if no more than a little can be stored in the folder."""
    if not hasattr(os, "posix_fallocate"):  # macOS
        return
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, ROOM_BYTES)
    except OSError as error:
        # Any other failure is not the database's, which was written just now.
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"{folder} has no room for {ROOM_BYTES} bytes: {error}") from error

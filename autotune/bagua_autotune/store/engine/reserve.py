"""Room on the disk that is kept for deleting.

SQLite writes to its log before anything is gone, also what it deletes: on a full disk nothing could
be deleted any more. So a file beside the database takes a little room, which whoever deletes has.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bagua_autotune.store.engine.location import FILE_MODE

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
    """The room beside one database.

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

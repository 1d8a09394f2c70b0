"""Whether a database can be written: tried from time to time, and after each failure."""

from __future__ import annotations

import time
from collections.abc import Callable

from sqlalchemy import update

from bagua_autotune.store.engine.database import Database
from bagua_autotune.store.engine.tables import SchemaRow
from bagua_autotune.store.errors import DiskFull

TRY_SECONDS = 10.0


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
        reserve = self._database.reserve
        if reserve is not None and not reserve.has_room():
            raise DiskFull(f"there is next to no room beside {self._database}")
        self._shown_until = now + TRY_SECONDS

"""Where jobs, trials and observations live: any database that SQLAlchemy speaks to."""

from __future__ import annotations

import time
from collections.abc import Callable

from sqlalchemy import select, update

from bagua_autotune.store.claims import Claims
from bagua_autotune.store.engine.database import Database
from bagua_autotune.store.engine.tables import SchemaRow
from bagua_autotune.store.errors import DiskFull
from bagua_autotune.store.events import StoredEvents, StoredProfiles
from bagua_autotune.store.families import StoredFamilies
from bagua_autotune.store.jobs import StoredJobs
from bagua_autotune.store.lives import StoredLives
from bagua_autotune.store.observations import StoredObservations
from bagua_autotune.store.trials import StoredTrials

VERSION = select(SchemaRow.version)
# The value that it has: all that counts is that it is written.
SAME_VERSION = update(SchemaRow).values(version=SchemaRow.version)
TRY_SECONDS = 10.0


class Store:
    """Jobs, their trials, and what the ranks reported of them, in one database.

    Each operation of a part is one transaction.
    """

    def __init__(self, url: str, *, as_found: bool = False) -> None:
        self.database = database = Database(url, as_found=as_found)
        self.jobs = StoredJobs(database)
        self.lives = StoredLives(database)
        self.claims = Claims(database)
        self.trials = StoredTrials(database)
        self.observations = StoredObservations(database)
        self.events = StoredEvents(database)
        self.profiles = StoredProfiles(database)
        self.families = StoredFamilies(database)
        self._writable = Writable(database)

    def close(self) -> None:
        self.database.close()

    def check(self) -> None:
        """Raise SQLAlchemyError unless the database answers a query and can be written."""
        self.database.read(VERSION)
        self._writable.check()


class Writable:
    """Whether a database can be written: tried from time to time, and after each failure.

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
        self._database.write(SAME_VERSION)
        reserve = self._database.reserve
        if reserve is not None and not reserve.has_room():
            raise DiskFull(f"there is next to no room beside {self._database}")
        self._shown_until = now + TRY_SECONDS

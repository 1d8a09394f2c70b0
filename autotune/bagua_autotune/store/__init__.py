"""Where jobs, trials and observations live: any database that SQLAlchemy speaks to."""

from __future__ import annotations

from sqlalchemy import select

from bagua_autotune.store.engine.database import Database
from bagua_autotune.store.engine.tables import SchemaRow
from bagua_autotune.store.engine.writable import Writable
from bagua_autotune.store.families import Families
from bagua_autotune.store.jobs import Jobs
from bagua_autotune.store.lives import Lives
from bagua_autotune.store.observations import Observations
from bagua_autotune.store.reports import Reports
from bagua_autotune.store.trials import Trials


class Store(Jobs, Lives, Trials, Observations, Reports, Families):
    """Jobs, their trials, and what the ranks reported of them, in one database.

    Each operation is one transaction.
    """

    def __init__(self, url: str, *, as_found: bool = False) -> None:
        self.database = Database(url, as_found=as_found)
        self._writable = Writable(self.database)

    def close(self) -> None:
        self.database.close()

    def check(self) -> None:
        """Raise SQLAlchemyError unless the database answers a query and can be written."""
        with self.database.reading() as session:
            session.scalar(select(SchemaRow.version))
        self._writable.check()

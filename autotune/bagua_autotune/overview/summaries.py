"""What is known of each job, summed up once per revision, for all who look at many jobs."""

from __future__ import annotations

from dataclasses import dataclass

from bagua_autotune.overview.cache import Cache
from bagua_autotune.overview.reading import read
from bagua_autotune.overview.summary import Summary, make_summary
from bagua_autotune.overview.totals import Totals, make_totals
from bagua_autotune.store import Store
from bagua_autotune.store.contacts import Contact

# A few kilobytes each.
MOST_JOBS = 5000


@dataclass(frozen=True)
class JobSum:
    """A job's latest round, and all of them together."""

    summary: Summary
    totals: Totals


class Summaries:
    """Of the jobs of a store. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: Cache[JobSum] = Cache(MOST_JOBS)

    def of(self, contact: Contact) -> JobSum:
        """As new as the contact, or newer. Raises UnknownJob if there is no such job."""
        return self._kept.get(contact.id, contact.version, lambda: self._make(contact.id))

    def known(self, contact: Contact) -> JobSum | None:
        """As the job was when it was last summed up, if it was."""
        found = self._kept.known(contact.id)
        is_of_it = found is not None and found.summary.created_at == contact.created_at
        return found if is_of_it else None

    def _make(self, job_id: str) -> JobSum:
        with self._store.database.reading():
            reading = read(self._store, job_id)
            summary = make_summary(self._store, reading)
            return JobSum(summary, make_totals(reading, summary))

"""Which jobs there are, and whether they are as they were; without reading what they are."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import bindparam, select

from bagua_autotune.store.errors import UnknownJob
from bagua_autotune.store.rows import job_row
from bagua_autotune.store.store import NEWEST_FIRST, Store
from bagua_autotune.store.tables import ClaimRow, JobRow


class Contact(NamedTuple):
    """A job as whoever looks at many of them needs it; times are seconds since the epoch."""

    id: str
    name: str
    phase: str
    revision: int
    created_at: float
    last_contact_at: float
    ended_at: float | None

    @property
    def version(self) -> tuple[float, int]:
        """Equal for as long as nothing of the job is written; another job may get its id."""
        return self.created_at, self.revision


COLUMNS = tuple(getattr(JobRow, field) for field in Contact._fields)
WITH_CLAIM = (
    select(*COLUMNS, ClaimRow.until)
    .outerjoin(ClaimRow, ClaimRow.job_id == JobRow.id)
    .where(JobRow.id == bindparam("job_id"))
)


def of_job(store: Store, job_id: str) -> Contact:
    """Raises UnknownJob if there is no such job."""
    with store.database.reading() as session:
        row = session.execute(select(*COLUMNS).where(JobRow.id == job_id)).one_or_none()
    if row is None:
        raise UnknownJob(job_id)
    return Contact._make(row)


def with_claim(store: Store, job_id: str) -> tuple[Contact, float | None]:
    """A job, and until when a replica has the right to decide on it (see claims); one row.

    Raises:
        UnknownJob: there is no such job.
    """
    with store.database.reading() as session:
        row = session.connection().execute(WITH_CLAIM, {"job_id": job_id}).one_or_none()
    if row is None:
        raise UnknownJob(job_id)
    *contact, until = row
    return Contact._make(contact), until


def newest(
    store: Store, name: str | None = None, limit: int = 100, after: str | None = None
) -> list[Contact]:
    """Newest first; of all jobs, or those of a name; all, or those behind the job ``after``.

    Raises UnknownJob if there is no such job.
    """
    query = select(*COLUMNS).order_by(*NEWEST_FIRST).limit(limit)
    if name is not None:
        query = query.where(JobRow.name == name)
    with store.database.reading() as session:
        if after is not None:
            created_at = job_row(session, after).created_at
            is_later = (JobRow.created_at == created_at) & (JobRow.id > after)
            query = query.where((JobRow.created_at < created_at) | is_later)
        return [Contact._make(row) for row in session.connection().execute(query)]


def since(store: Store, at: float) -> list[Contact]:
    """The jobs heard of since then, newest first."""
    query = select(*COLUMNS).where(JobRow.last_contact_at >= at).order_by(*NEWEST_FIRST)
    with store.database.reading() as session:
        return [Contact._make(row) for row in session.connection().execute(query)]

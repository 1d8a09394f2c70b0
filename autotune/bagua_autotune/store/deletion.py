"""Deletes jobs, with all that belongs to them.

Each transaction is small, so that no report waits long for the database.
"""

from __future__ import annotations

import time

from sqlalchemy import ColumnElement, delete, select

from bagua_autotune.model.job import SILENT_SECONDS, JobPhase
from bagua_autotune.model.text import describe_seconds
from bagua_autotune.model.view import Moment, View
from bagua_autotune.store import Store
from bagua_autotune.store.errors import JobLives, UnknownJob
from bagua_autotune.store.tables import JobRow, ObservationRow, TrialRow

ROWS_AT_ONCE = 1000


class DeletedJob(View):
    """A job that was deleted, or would be."""

    id: str
    name: str
    state: JobPhase
    last_contact_at: Moment


class Deleted(View):
    """The jobs that were deleted: one for each life of the training, the first one first."""

    jobs: list[DeletedJob]


DELETED_COLUMNS = JobRow.id, JobRow.name, JobRow.phase.label("state"), JobRow.last_contact_at


def delete_training(store: Store, job_id: str, force: bool = False) -> Deleted:
    """Delete a job with all lives of its training.

    Args:
        force: also if the training may still run, which goes on. While it is being tuned its next
            report finds no job, so it registers again and is tuned from its beginning. Bagua's own
            workers would fail instead, so theirs is not deleted until it was silent for an hour.

    Raises:
        UnknownJob: there is no such job.
        JobLives: its training may still run; nothing is deleted.
    """
    now = time.time()
    may_go = JobRow.ended_at.is_not(None) | (JobRow.last_contact_at < now - SILENT_SECONDS)
    if force:
        may_go |= JobRow.protocol == "v2"
    ids = [life for life, _ in store.lives(job_id)]
    _refuse_living(store, ids, may_go, now)
    found = (delete_where(store, (JobRow.id == life) & may_go) for life in ids)
    deleted = [job for job in found if job]
    if not deleted:
        _refuse_living(store, ids, may_go, now)  # it was heard of again just now
        raise UnknownJob(job_id)  # another replica was the first
    store.forget_families()
    return Deleted(jobs=deleted)


def _refuse_living(store: Store, ids: list[str], may_go: ColumnElement[bool], now: float) -> None:
    columns = JobRow.id, JobRow.protocol, JobRow.last_contact_at
    with store.database.reading() as session:
        living = session.execute(select(*columns).where(JobRow.id.in_(ids), ~may_go)).first()
    if living is not None:
        ago = describe_seconds(max(0.0, now - living.last_contact_at))
        raise JobLives(living.id, ago, can_be_forced=living.protocol == "v2")


def delete_where(store: Store, which: ColumnElement[bool]) -> DeletedJob | None:
    """Delete the one job of which this is true, for as long as it is true of it."""
    steps = select(ObservationRow.id).join(TrialRow).join(JobRow).where(which).limit(ROWS_AT_ONCE)
    while True:
        with store.database.writing() as session:
            ids = list(session.scalars(steps))
            session.execute(delete(ObservationRow).where(ObservationRow.id.in_(ids)))
        if len(ids) < ROWS_AT_ONCE:
            break
    deletion = delete(JobRow).where(which).returning(*DELETED_COLUMNS)
    with store.database.writing() as session:
        row = session.execute(deletion).mappings().one_or_none()
        return None if row is None else DeletedJob.model_validate(row)

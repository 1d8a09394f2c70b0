"""What a protocol stores that knows each rank by itself, as Bagua's /api/v1 does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import select

from bagua_autotune.store.store import Store, locked_row, trial_row
from bagua_autotune.store.tables import AliasRow, JobRow, ObservationRow

Data = dict[str, Any]


def put_value(
    store: Store, job_id: str, index: int, step: int, rank: int, value: float, at: float
) -> bool:
    """Store one rank's value of one step of a trial. False if that rank's is there already.

    Raises:
        UnknownTrial: the job has no such trial.
    """
    with store.database.writing() as session:
        locked_row(session, job_id).last_contact_at = at
        trial = trial_row(session, job_id, index)
        query = select(ObservationRow).where(
            ObservationRow.trial_id == trial.id, ObservationRow.step == step
        )
        row = session.scalar(query)
        if row is None:
            row = ObservationRow(trial_id=trial.id, step=step, values=[])
            session.add(row)
        values = [*row.values, *[None] * (rank + 1 - len(row.values))]
        if values[rank] is not None:
            return False
        values[rank] = value
        row.values = values  # a new list: SQLAlchemy does not see changes inside JSON
        if trial.state == "proposed":
            trial.state, trial.started_at = "running", at
        return True


def update_data(store: Store, job_id: str, change: Callable[[Data], Data]) -> Data:
    """Replace the protocol's own state of a job by ``change`` of it, in one transaction."""
    with store.database.writing() as session:
        row = locked_row(session, job_id)
        row.data = change(dict(row.data))
        return dict(row.data)


def jobs_with(store: Store, key: str, value: str) -> list[str]:
    """Ids of the v1 jobs whose data has this entry, oldest first."""
    query = select(JobRow.id).where(JobRow.protocol == "v1", JobRow.data[key].as_string() == value)
    with store.database.reading() as session:
        return list(session.scalars(query.order_by(JobRow.created_at, JobRow.id)))


def add_alias(store: Store, alias: str, rank: int, job_id: str) -> None:
    """Let ``alias`` on ``rank`` mean this job from now on."""
    with store.database.writing() as session:
        locked_row(session, job_id)
        session.merge(AliasRow(alias=alias, rank=rank, job_id=job_id))


def resolve_alias(store: Store, alias: str, rank: int) -> str | None:
    """The id of the job that ``alias`` means on ``rank``."""
    with store.database.reading() as session:
        row = session.get(AliasRow, (alias, rank))
        return row.job_id if row else None

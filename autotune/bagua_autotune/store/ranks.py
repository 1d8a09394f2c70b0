"""What a protocol stores that knows each rank by itself, as Bagua's /api/v1 does."""

from __future__ import annotations

from sqlalchemy import select

from bagua_autotune.store.rows import locked_row, start, trial_row
from bagua_autotune.store.store import Store
from bagua_autotune.store.tables import ObservationRow


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
        start(trial, at)
        return True


def widen(store: Store, job_id: str, rank_count: int) -> None:
    """Note that the job has at least so many ranks, where nobody said how many it has."""
    with store.database.writing() as session:
        row = locked_row(session, job_id)
        if row.spec["world_size"] < rank_count:
            row.spec = {**row.spec, "world_size": rank_count, "ranks_per_node": [rank_count]}

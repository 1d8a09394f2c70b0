"""Long lists in parts: each begins behind the last key of the one before, so that nothing is read
twice or left out while more is written."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import select, tuple_

from bagua_autotune.model.job import Event, Observation
from bagua_autotune.store import records
from bagua_autotune.store.reports import OBSERVED
from bagua_autotune.store.rows import check_job, trial_row
from bagua_autotune.store.store import Store
from bagua_autotune.store.tables import EventRow, ObservationRow, TrialRow


class ObservationKey(NamedTuple):
    """In this order observations are listed."""

    trial: int
    step: int


def observations(
    store: Store, job_id: str, limit: int, after: ObservationKey | None, index: int | None
) -> list[tuple[int, Observation]]:
    """Pairs of trial index and observation, of one trial or of all.

    Raises UnknownJob, and UnknownTrial if there is no such trial.
    """
    query = (
        select(TrialRow.index, ObservationRow.step, *OBSERVED)
        .join(ObservationRow, ObservationRow.trial_id == TrialRow.id)
        .where(TrialRow.job_id == job_id)
        .order_by(TrialRow.index, ObservationRow.step)
        .limit(limit)
    )
    if after is not None:
        query = query.where(tuple_(TrialRow.index, ObservationRow.step) > tuple_(*after))
    with store.database.reading() as session:
        check_job(session, job_id)
        if index is not None:
            query = query.where(TrialRow.id == trial_row(session, job_id, index).id)
        return [
            (trial, records.observation_record(step, values, compute))
            for trial, step, values, compute in session.execute(query)
        ]


def events(store: Store, job_id: str, limit: int, after: int) -> list[tuple[int, Event]]:
    """With the keys by which they are listed, oldest first. Raises UnknownJob."""
    query = select(EventRow).where(EventRow.job_id == job_id, EventRow.id > after)
    with store.database.reading() as session:
        check_job(session, job_id)
        rows = session.scalars(query.order_by(EventRow.id).limit(limit))
        return [(row.id, records.event_record(row)) for row in rows]

"""What is read of a job without reading all that its ranks told of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import BindParameter, ScalarSelect, bindparam, func, select

from bagua_autotune.model.job import Event, EventKind, Observation
from bagua_autotune.model.profile import Profile
from bagua_autotune.store import records
from bagua_autotune.store.reports import OBSERVED
from bagua_autotune.store.store import Store
from bagua_autotune.store.tables import EventRow, ObservationRow, ProfileRow, TrialRow

# What is read of every job that changed is put together once.
JOB_ID: BindParameter[str] = bindparam("job_id")
STEPS = (
    select(
        TrialRow.index,
        func.min(ObservationRow.step),
        func.max(ObservationRow.step),
        func.count(ObservationRow.step) + TrialRow.thinned_steps,
    )
    .join(ObservationRow)
    .where(TrialRow.job_id == JOB_ID)
    .group_by(TrialRow.id)
    .order_by(TrialRow.index)
)
LATEST_OBSERVATIONS = (
    select(ObservationRow.step, *OBSERVED)
    .where(
        ObservationRow.trial_id
        == select(TrialRow.id)
        .where(TrialRow.job_id == JOB_ID, TrialRow.index == bindparam("trial"))
        .scalar_subquery()
    )
    .order_by(ObservationRow.step.desc())
    .limit(bindparam("count"))
)
COSTS = (
    select(ObservationRow.cost)
    .join(TrialRow)
    .where(TrialRow.job_id == JOB_ID, TrialRow.index == bindparam("trial"))
    .order_by(ObservationRow.step)
)
SWITCH_SECONDS = (
    select(EventRow.trial, func.sum(EventRow.seconds))
    .where(
        EventRow.job_id == JOB_ID,
        EventRow.kind == "switched",
        EventRow.trial.is_not(None),
        EventRow.seconds.is_not(None),
    )
    .group_by(EventRow.trial)
)
COUNT_EVENTS = select(func.count()).where(
    EventRow.job_id == JOB_ID, EventRow.kind == bindparam("kind")
)


@dataclass(frozen=True)
class Steps:
    """Of those that were observed under a trial, the first, the last, and how many."""

    first: int
    last: int
    count: int


class StepTime(NamedTuple):
    """A step of a trial, with the slowest rank's value."""

    trial: int
    step: int
    slowest: float


def steps(store: Store, job_id: str) -> dict[int, Steps]:
    """By trial index; without the trials of which no step was observed."""
    with store.database.reading() as session:
        rows = session.connection().execute(STEPS, {"job_id": job_id}).all()
        return {index: Steps(first, last, count) for index, first, last, count in rows}


def step_times(store: Store, job_id: str) -> list[StepTime]:
    """In step order. Of a v1 job nothing: what its ranks report are no times."""
    columns = (TrialRow.index, ObservationRow.step, ObservationRow.slowest)
    query = select(*columns).join(ObservationRow).where(TrialRow.job_id == job_id)
    with store.database.reading() as session:
        rows = session.execute(query.order_by(TrialRow.index, ObservationRow.step))
        return [StepTime(trial, step, slow) for trial, step, slow in rows if slow is not None]


def costs(store: Store, job_id: str, trial: int) -> list[float | None]:
    """Of all steps of a trial, in step order; None where it is not stored."""
    with store.database.reading() as session:
        given = {"job_id": job_id, "trial": trial}
        return list(session.connection().scalars(COSTS, given))


def latest_observations(store: Store, job_id: str, trial: int, count: int) -> list[Observation]:
    """The last steps of a trial, in step order."""
    given = {"job_id": job_id, "trial": trial, "count": count}
    with store.database.reading() as session:
        rows = session.connection().execute(LATEST_OBSERVATIONS, given).all()
        return [records.observation_record(*row) for row in reversed(rows)]


def latest_profiles(
    store: Store, job_id: str, count: int, trial: int | None = None
) -> list[Profile]:
    """The last profiled steps of a trial, by default of the newest profiled one; in order."""
    query = select(ProfileRow.content).order_by(ProfileRow.step.desc())
    with store.database.reading() as session:
        of = _newest_profiled(job_id) if trial is None else _trial(job_id, trial)
        rows = session.scalars(query.where(ProfileRow.trial_id == of).limit(count)).all()
        return [records.profile_record(content) for content in reversed(rows)]


def switch_seconds(store: Store, job_id: str) -> dict[int, float]:
    """By trial index how long the ranks took to cut their buckets for it, all times together."""
    with store.database.reading() as session:
        rows: Sequence[Any] = session.connection().execute(SWITCH_SECONDS, {"job_id": job_id}).all()
        return dict(map(tuple, rows))


def count_events(store: Store, job_id: str, kind: EventKind) -> int:
    """How many of this kind the ranks told of."""
    with store.database.reading() as session:
        given = {"job_id": job_id, "kind": kind}
        return session.connection().scalar(COUNT_EVENTS, given) or 0


def last_event(store: Store, job_id: str, kind: EventKind) -> Event | None:
    """The newest of this kind."""
    query = select(EventRow).where(EventRow.job_id == job_id, EventRow.kind == kind)
    with store.database.reading() as session:
        row = session.scalar(query.order_by(EventRow.id.desc()).limit(1))
        return records.event_record(row) if row else None


def _trial(job_id: str, index: int) -> ScalarSelect[int]:
    query = select(TrialRow.id).where(TrialRow.job_id == job_id, TrialRow.index == index)
    return query.scalar_subquery()


def _newest_profiled(job_id: str) -> ScalarSelect[int]:
    query = select(TrialRow.id).where(TrialRow.job_id == job_id)
    query = query.where(select(ProfileRow.id).where(ProfileRow.trial_id == TrialRow.id).exists())
    return query.order_by(TrialRow.index.desc()).limit(1).scalar_subquery()

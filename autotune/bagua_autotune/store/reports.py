"""What the ranks tell of a job: the steps of its trials, profiles of some, events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sqlalchemy import Connection, bindparam, case, delete, func, insert, select, tuple_, update
from sqlalchemy.orm import Session

from bagua_autotune.model.job import Event, Job, Observation, Trial
from bagua_autotune.model.profile import Profile
from bagua_autotune.store import records
from bagua_autotune.store.database import Database
from bagua_autotune.store.errors import UnknownJob, UnknownTrial
from bagua_autotune.store.rows import check_job, locked_row, trial_row
from bagua_autotune.store.tables import EventRow, JobRow, ObservationRow, ProfileRow, TrialRow

MOST_PROFILES = 5
# Ranks go on under a trial that was closed until the next is chosen, which nothing is learnt from.
MOST_LATE_STEPS = 100
# Of one kind, and of one trial where it is of one.
MOST_EVENTS = 100
OBSERVED = (ObservationRow.values, ObservationRow.compute)
# What every report runs is put together once. The job's row is locked by being written. A lost job
# is known by its last contact, which stays until it is resumed.
HEAR = (
    update(JobRow)
    .where(JobRow.id == bindparam("of_job"))
    .values(
        revision=JobRow.revision + 1,
        last_contact_at=case(
            (JobRow.ended_at > JobRow.last_contact_at, JobRow.last_contact_at),
            else_=bindparam("at"),
        ),
    )
    .returning(*records.JOB_COLUMNS)
)
# What a report needs of a trial and, after it, what its record is made of.
TRIALS = select(TrialRow.id, TrialRow.late_steps, *records.TRIAL_COLUMNS).where(
    TrialRow.job_id == bindparam("job_id")
)
TRIALS = TRIALS.order_by(TrialRow.index)
COSTS = select(ObservationRow.step, ObservationRow.cost)
COSTS = COSTS.where(ObservationRow.trial_id == bindparam("trial_id"))


class ObservationKey(NamedTuple):
    """In this order observations are listed."""

    trial: int
    step: int


@dataclass(frozen=True)
class Reported:
    """A job after a report.

    Attributes:
        trials: all of the job's.
        new: the steps that were not known.
        costs: of every step of the trial, in step order; None where it is not stored.
    """

    job: Job
    trials: list[Trial]
    new: list[Observation]
    costs: list[float | None]


class Reports:
    """The part of the store that keeps them.

    Every method raises UnknownJob if there is no such job; those that take an ``index`` raise
    UnknownTrial if the job has no such trial.
    """

    def __init__(self, database: Database) -> None:
        self.database = database

    def add_observations(
        self,
        job_id: str,
        index: int,
        observations: Sequence[Observation],
        at: float,
        weigh: Callable[[Job, Trial], Sequence[float | None]] | None = None,
    ) -> Reported:
        """Store the steps that are new to the trial.

        Of steps that come when it is closed already, MOST_LATE_STEPS are; the step in which a lost
        job stood still is not.

        The trial is running from now on, unless the ranks told of their switch to it before.

        Args:
            weigh: the cost of each of the observations, stored with it; what it raises leaves all
                as it was.
        """
        with self.database.writing() as session:
            connection = session.connection()
            job_row = connection.execute(HEAR, {"of_job": job_id, "at": at}).one_or_none()
            if job_row is None:
                raise UnknownJob(job_id)
            job = records.job_record(job_row)
            rows = connection.execute(TRIALS, {"job_id": job_id}).all()
            trials = [records.trial_record(row[2:]) for row in rows]
            if index >= len(trials):
                raise UnknownTrial(index)
            weighed = weigh(job, trials[index]) if weigh else [None] * len(observations)
            trial_id = rows[index].id
            known = connection.execute(COSTS, {"trial_id": trial_id}).all()
            costs: dict[int, float | None] = dict(known)
            pairs = zip(observations, weighed, strict=True)
            told = [
                (each, cost)
                for each, cost in pairs
                if each.step not in costs and not _is_absence(job, each, at)
            ]
            if not trials[index].is_open:
                told = told[: max(0, MOST_LATE_STEPS - rows[index].late_steps)]
                _count_late(connection, trial_id, len(told))
            new = [each for each, _ in told]
            if new:
                costs.update((each.step, cost) for each, cost in told)
                rows_of = [_observation_row(trial_id, *each) for each in told]
                connection.execute(insert(ObservationRow), rows_of)
                if trials[index].state == "proposed":
                    trials[index] = _start(connection, trial_id, trials[index], at)
        return Reported(job, trials, new, [costs[step] for step in sorted(costs)])

    def observations(
        self,
        job_id: str,
        index: int | None = None,
        after: ObservationKey | None = None,
        limit: int | None = None,
    ) -> list[tuple[int, Observation]]:
        """Pairs of trial index and observation, of one trial or of all, in step order; all, or so
        many of those behind ``after``."""
        query = (
            select(TrialRow.index, ObservationRow.step, *OBSERVED)
            .join(ObservationRow, ObservationRow.trial_id == TrialRow.id)
            .where(TrialRow.job_id == job_id)
            .order_by(TrialRow.index, ObservationRow.step)
            .limit(limit)
        )
        if after is not None:
            query = query.where(tuple_(TrialRow.index, ObservationRow.step) > tuple_(*after))
        with self.database.reading() as session:
            check_job(session, job_id)
            if index is not None:
                query = query.where(TrialRow.id == trial_row(session, job_id, index).id)
            return [
                (trial, records.observation_record(step, values, compute))
                for trial, step, values, compute in session.execute(query)
            ]

    def count_observations(self, job_id: str) -> int:
        """Of all its trials; 0 if there is no such job."""
        query = select(func.count()).select_from(ObservationRow).join(TrialRow)
        with self.database.reading() as session:
            return session.scalar(query.where(TrialRow.job_id == job_id)) or 0

    def add_profile(self, job_id: str, index: int, profile: Profile, at: float) -> bool:
        """Store a profiled step of a trial.

        Returns:
            False if that step is there already, or enough of the trial's (``MOST_PROFILES``).
        """
        with self.database.writing() as session:
            locked_row(session, job_id).last_contact_at = at
            trial = trial_row(session, job_id, index)
            query = select(ProfileRow.step).where(ProfileRow.trial_id == trial.id)
            known = set(session.scalars(query))
            if profile.step in known or len(known) >= MOST_PROFILES:
                return False
            content = records.profile_column(profile)
            session.add(ProfileRow(trial_id=trial.id, step=profile.step, content=content))
            return True

    def profiles(self, job_id: str, index: int | None = None) -> list[tuple[int, Profile]]:
        """Pairs of trial index and profile, of one trial or of all, in step order."""
        query = (
            select(TrialRow.index, ProfileRow.content)
            .join(ProfileRow, ProfileRow.trial_id == TrialRow.id)
            .where(TrialRow.job_id == job_id)
            .order_by(TrialRow.index, ProfileRow.step)
        )
        with self.database.reading() as session:
            check_job(session, job_id)
            if index is not None:
                query = query.where(TrialRow.id == trial_row(session, job_id, index).id)
            return [
                (trial, records.profile_record(content))
                for trial, content in session.execute(query)
            ]

    def add_event(self, job_id: str, event: Event) -> float | None:
        """Store it, unless it was told before, or too often.

        Of the same kind and trial the newest MOST_EVENTS are kept; of switches, which are billed,
        the first ones.

        Returns:
            When it was told before, in seconds since the epoch; None if it is new.
        """
        key = records.event_key(event)
        with self.database.writing() as session:
            locked_row(session, job_id).last_contact_at = event.at
            if key is not None:
                query = select(EventRow.at).where(EventRow.job_id == job_id, EventRow.key == key)
                told_at = session.scalar(query)
                if told_at is not None:
                    return told_at
            if _has_room(session, job_id, event):
                session.add(EventRow(job_id=job_id, key=key, **vars(event)))
            return None

    def events(self, job_id: str, newest: int | None = None) -> list[Event]:
        """All, or so many of the newest; oldest first."""
        with self.database.reading() as session:
            check_job(session, job_id)
            query = select(EventRow).where(EventRow.job_id == job_id)
            rows = session.scalars(query.order_by(EventRow.id.desc()).limit(newest)).all()
            return [records.event_record(row) for row in reversed(rows)]

    def events_after(self, job_id: str, key: int, limit: int) -> list[tuple[int, Event]]:
        """With their keys, oldest first: so many of those behind ``key``, which is 0 at first."""
        query = select(EventRow).where(EventRow.job_id == job_id, EventRow.id > key)
        with self.database.reading() as session:
            check_job(session, job_id)
            rows = session.scalars(query.order_by(EventRow.id).limit(limit))
            return [(row.id, records.event_record(row)) for row in rows]


def _has_room(session: Session, job_id: str, event: Event) -> bool:
    """Whether the event may be stored; makes room for it where its like may go."""
    likes = select(EventRow.id).where(
        EventRow.job_id == job_id,
        EventRow.kind == event.kind,
        EventRow.trial == event.trial if event.trial is not None else EventRow.trial.is_(None),
    )
    older = session.scalars(likes.order_by(EventRow.id.desc()).offset(MOST_EVENTS - 1)).all()
    if older and event.kind == "switched":
        return False
    session.execute(delete(EventRow).where(EventRow.id.in_(older)))
    return True


def _is_absence(job: Job, told: Observation, at: float) -> bool:
    """Whether it is the step in which a job that was lost stood still: it measures nothing."""
    silent_seconds = at - job.last_contact_at
    return (
        job.is_lost
        and job.protocol == "v2"  # others tell speeds
        and max(value or 0.0 for value in told.values) > silent_seconds / 2
    )


def _count_late(connection: Connection, trial_id: int, steps: int) -> None:
    if steps:
        late = TrialRow.late_steps + steps
        connection.execute(update(TrialRow).where(TrialRow.id == trial_id).values(late_steps=late))


def _start(connection: Connection, trial_id: int, trial: Trial, at: float) -> Trial:
    statement = update(TrialRow).where(TrialRow.id == trial_id)
    connection.execute(statement.values(state="running", started_at=at))
    return replace(trial, state="running", started_at=at)


def _observation_row(trial_id: int, found: Observation, cost: float | None) -> dict[str, Any]:
    told = [value for value in found.values if value is not None]
    return {
        "trial_id": trial_id,
        "step": found.step,
        "values": list(found.values),
        "slowest": max(told, default=None),
        "cost": cost,
        "compute": list(found.compute) if found.compute is not None else None,
    }

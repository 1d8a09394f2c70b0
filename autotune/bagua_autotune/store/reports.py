"""What the ranks tell of a job: the steps of its trials, profiles of some, events."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from bagua_autotune.model.job import Event, Observation
from bagua_autotune.model.profile import Profile
from bagua_autotune.store import records
from bagua_autotune.store.database import Database
from bagua_autotune.store.rows import check_job, locked_row, start, trial_row
from bagua_autotune.store.tables import EventRow, ObservationRow, ProfileRow, TrialRow

MOST_PROFILES = 5
# Ranks go on under a trial that was closed until the next is chosen, which nothing is learnt from.
MOST_LATE_STEPS = 100
# Of one kind, and of one trial where it is of one.
MOST_EVENTS = 100
OBSERVED = (ObservationRow.values, ObservationRow.compute)


class Reports:
    """The part of the store that keeps them.

    Every method raises UnknownJob if there is no such job; those that take an ``index`` raise
    UnknownTrial if the job has no such trial.
    """

    def __init__(self, database: Database) -> None:
        self.database = database

    def add_observations(
        self, job_id: str, index: int, observations: Sequence[Observation], at: float
    ) -> list[Observation]:
        """Store the steps that are new to the trial; returns those.

        Of steps that come when it is closed already, MOST_LATE_STEPS are.

        The trial is running from now on, unless the ranks told of their switch to it before.
        """
        with self.database.writing() as session:
            locked_row(session, job_id).last_contact_at = at
            trial = trial_row(session, job_id, index)
            if not observations:
                return []
            steps = [observation.step for observation in observations]
            query = select(ObservationRow.step).where(
                ObservationRow.trial_id == trial.id,
                ObservationRow.step.between(min(steps), max(steps)),
            )
            known = set(session.scalars(query))
            new = [o for o in observations if o.step not in known]
            if trial.state in ("measured", "failed"):
                new = new[: MOST_LATE_STEPS - trial.late_steps]
                trial.late_steps += len(new)
            session.add_all(_observation_row(trial.id, observation) for observation in new)
            start(trial, at)
            return new

    def observations(self, job_id: str, index: int | None = None) -> list[tuple[int, Observation]]:
        """Pairs of trial index and observation, of one trial or of all, in step order."""
        query = (
            select(TrialRow.index, ObservationRow.step, *OBSERVED)
            .join(ObservationRow, ObservationRow.trial_id == TrialRow.id)
            .where(TrialRow.job_id == job_id)
            .order_by(TrialRow.index, ObservationRow.step)
        )
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


def _observation_row(trial_id: int, found: Observation) -> ObservationRow:
    told = [value for value in found.values if value is not None]
    return ObservationRow(
        trial_id=trial_id,
        step=found.step,
        values=list(found.values),
        slowest=max(told, default=None),
        compute=list(found.compute) if found.compute is not None else None,
    )

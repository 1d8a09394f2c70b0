"""What the ranks report of a job besides its steps: events, and profiles of a few steps."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any, cast

from sqlalchemy import bindparam, delete, func, select
from sqlalchemy.orm import Session

from bagua_autotune.model.job import Event, EventKind
from bagua_autotune.model.received import PROFILE
from bagua_autotune.store.engine.database import Database, Statement
from bagua_autotune.store.engine.tables import EventRow, ProfileRow, TrialRow
from bagua_autotune.store.rows import check_job, locked, trial_row
from bagua_wire.profile import Profile

# Of one kind and one trial.
MOST_EVENTS = 100
# Of one trial: when gradients were ready and buckets travelled.
MOST_PROFILES = 5
# Statements that are used often are built once.
OF_JOB = EventRow.job_id == bindparam("job_id")
COUNT_EVENTS = Statement(select(func.count()).where(OF_JOB, EventRow.kind == bindparam("kind")))
SWITCH_SECONDS = Statement(
    select(EventRow.trial, func.sum(EventRow.seconds))
    .where(OF_JOB, EventRow.kind == "switched")
    .where(EventRow.trial.is_not(None), EventRow.seconds.is_not(None))
    .group_by(EventRow.trial)
)


class Reports:
    """The part of the store that keeps events and profiles.

    Methods with an ``index`` raise UnknownJob if there is no such job and UnknownTrial if it has
    no such trial.
    """

    database: Database

    def add_event(self, job_id: str, event: Event) -> float | None:
        """Store the event, unless it was reported before.

        Of one kind and trial the newest MOST_EVENTS are kept; of switches, whose time counts as
        cost, the first ones.

        Returns:
            When it was reported before, in seconds since the epoch; None if it is new.
        """
        key = _key(event)
        with locked(self.database, job_id) as (session, row):
            row.last_contact_at = event.at
            if key is not None:
                query = select(EventRow.at).where(EventRow.job_id == job_id, EventRow.key == key)
                told_at = session.scalar(query)
                if told_at is not None:
                    return told_at
            if _has_room(session, job_id, event):
                session.add(EventRow(job_id=job_id, key=key, **vars(event)))
            return None

    def events(
        self, job_id: str, newest: int | None = None, kind: EventKind | None = None
    ) -> list[Event]:
        """All events, of this kind, or so many of the newest; oldest first."""
        query = select(EventRow).where(EventRow.job_id == job_id)
        if kind is not None:
            query = query.where(EventRow.kind == kind)
        with self.database.reading() as session:
            check_job(session, job_id)
            found = session.scalars(query.order_by(EventRow.id.desc()).limit(newest)).all()
            return [_event(row) for row in reversed(found)]

    def events_after(self, job_id: str, key: int, limit: int) -> list[tuple[int, Event]]:
        """Return at most so many events after ``key`` (0: from the first on), oldest first, with
        their keys."""
        query = select(EventRow).where(EventRow.job_id == job_id, EventRow.id > key)
        with self.database.reading() as session:
            check_job(session, job_id)
            found = session.scalars(query.order_by(EventRow.id).limit(limit))
            return [(row.id, _event(row)) for row in found]

    def switch_seconds(self, job_id: str) -> dict[int, float]:
        """Return by trial index the seconds that the ranks took to switch to it, in all."""
        return dict(self.database.ask(SWITCH_SECONDS, job_id=job_id))

    def count_events(self, job_id: str, kind: EventKind) -> int:
        """How many events of this kind the ranks reported."""
        return int(self.database.ask(COUNT_EVENTS, job_id=job_id, kind=kind)[0][0])

    def add_profile(self, job_id: str, index: int, profile: Profile, at: float) -> bool:
        """Store a profiled step of a trial.

        Returns:
            False if the step is stored already, or MOST_PROFILES of the trial are.
        """
        with locked(self.database, job_id) as (session, row):
            row.last_contact_at = at
            trial = trial_row(session, job_id, index)
            query = select(ProfileRow.step).where(ProfileRow.trial_id == trial.id)
            known = set(session.scalars(query))
            if profile.step in known or len(known) >= MOST_PROFILES:
                return False
            content = asdict(profile)
            session.add(ProfileRow(trial_id=trial.id, step=profile.step, content=content))
            return True

    def profiles(self, job_id: str, index: int | None = None) -> list[tuple[int, Profile]]:
        """Pairs of trial index and profile, of one trial or all, in step order."""
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
            found = session.execute(query)
            return [(trial, PROFILE.validate_python(told)) for trial, told in found]

    def latest_profiles(self, job_id: str, count: int, trial: int | None = None) -> list[Profile]:
        """The last profiled steps of a trial, by default of the newest profiled one; in order."""
        of_job = TrialRow.job_id == job_id
        newest = select(func.max(TrialRow.index)).join(ProfileRow).where(of_job).scalar_subquery()
        query = select(ProfileRow.content).join(TrialRow).where(of_job)
        query = query.where(TrialRow.index == (newest if trial is None else trial))
        with self.database.reading() as session:
            found = session.scalars(query.order_by(ProfileRow.step.desc()).limit(count)).all()
            return [PROFILE.validate_python(told) for told in reversed(found)]


def _key(event: Event) -> str | None:
    """Return a key that is equal for a report that is sent again; None if the event names
    no step."""
    if event.step is None:
        return None
    told = [event.kind, event.trial, event.step, event.message]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _event(row: EventRow) -> Event:
    return Event(cast(Any, row.kind), row.trial, row.step, row.message, row.seconds, row.at)


def _has_room(session: Session, job_id: str, event: Event) -> bool:
    """Whether the event may be stored; deletes an older one of its kind if it must."""
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

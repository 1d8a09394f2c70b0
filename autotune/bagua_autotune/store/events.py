"""What the ranks report of a job besides its steps: events, and profiles of a few steps."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any, cast

from sqlalchemy import BigInteger, bindparam, delete, func, select

from bagua_autotune.model.job import Event, EventKind
from bagua_autotune.model.received import PROFILE
from bagua_autotune.store import rows
from bagua_autotune.store.engine.database import Database, Run
from bagua_autotune.store.engine.tables import EventRow, ProfileRow, TrialRow
from bagua_autotune.store.errors import UnknownTrial
from bagua_autotune.store.rows import OF_TRIAL, add, change_job, check, locked
from bagua_wire.profile import Profile

# Of one kind and one trial.
MOST_EVENTS = 100
# Of one trial: when gradients were ready and buckets travelled.
MOST_PROFILES = 5
OF_JOB = EventRow.job_id == bindparam("job_id")
EVENTS = select(
    *(EventRow.id, EventRow.kind, EventRow.trial, EventRow.step),
    *(EventRow.message, EventRow.seconds, EventRow.at),
).where(OF_JOB)
NEWEST = EVENTS.order_by(EventRow.id.desc()).limit(bindparam("most"))
NEWEST_OF_KIND = NEWEST.where(EventRow.kind == bindparam("kind"))
OF_KEY = select(EventRow.at).where(OF_JOB, EventRow.key == bindparam("key"))
COUNT_EVENTS = select(func.count()).where(OF_JOB, EventRow.kind == bindparam("kind"))
SWITCH_SECONDS = (
    select(EventRow.trial, func.sum(EventRow.seconds))
    .where(OF_JOB, EventRow.kind == "switched")
    .where(EventRow.trial.is_not(None), EventRow.seconds.is_not(None))
    .group_by(EventRow.trial)
)
PROFILES = (
    select(TrialRow.index, ProfileRow.content)
    .join(ProfileRow, ProfileRow.trial_id == TrialRow.id)
    .where(TrialRow.job_id == bindparam("job_id"))
)
PROFILED = select(func.max(TrialRow.index)).join(ProfileRow).where(rows.OF_JOB).scalar_subquery()
LATEST = (
    PROFILES.where(TrialRow.index == func.coalesce(bindparam("trial", type_=BigInteger), PROFILED))
    .order_by(ProfileRow.step.desc())
    .limit(bindparam("most"))
)
PROFILED_STEPS = select(TrialRow.id, ProfileRow.step).outerjoin(ProfileRow).where(OF_TRIAL)


class StoredEvents:
    """Methods raise UnknownJob if there is no such job, unless they count or sum up."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, job_id: str, event: Event) -> float | None:
        """Store the event, unless it was reported before.

        Of one kind and trial the newest MOST_EVENTS are kept; of switches, whose time counts as
        cost, the first ones.

        Returns:
            When it was reported before, in seconds since the epoch; None if it is new.
        """
        key = _key(event)
        with locked(self._database, job_id) as (run, _):
            change_job(run, job_id, last_contact_at=event.at)
            told = run(OF_KEY, job_id=job_id, key=key) if key else ()
            if told:
                return float(told[0].at)
            if _has_room(run, job_id, event):
                add(run, EventRow, job_id=job_id, key=key, **vars(event))
            return None

    def of(
        self, job_id: str, newest: int | None = None, kind: EventKind | None = None
    ) -> list[Event]:
        """All events, of this kind, or so many of the newest; oldest first."""
        which = NEWEST if kind is None else NEWEST_OF_KIND
        found = self._read(which, job_id=job_id, kind=kind, most=newest or rows.ALL)
        return [event for _, event in reversed(found)]

    def after(self, job_id: str, key: int, limit: int) -> list[tuple[int, Event]]:
        """Return at most so many events after ``key`` (0: from the first on), oldest first, with
        their keys."""
        query = EVENTS.where(EventRow.id > key)
        return self._read(query.order_by(EventRow.id).limit(limit), job_id=job_id)

    def _read(self, query: Any, job_id: str, **values: Any) -> list[tuple[int, Event]]:
        found = self._database.read(query, job_id=job_id, **values)
        if not found:
            check(self._database.read, job_id)
        return [(key, Event(cast(Any, kind), *told)) for key, kind, *told in found]

    def switch_seconds(self, job_id: str) -> dict[int, float]:
        """Return by trial index the seconds that the ranks took to switch to it, in all."""
        return dict(self._database.read(SWITCH_SECONDS, job_id=job_id))

    def count(self, job_id: str, kind: EventKind) -> int:
        """How many events of this kind the ranks reported."""
        return int(self._database.read(COUNT_EVENTS, job_id=job_id, kind=kind)[0][0])


class StoredProfiles:
    """Methods raise UnknownJob if there is no such job and UnknownTrial if it has no such trial;
    ``latest`` is then empty."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, job_id: str, index: int, profile: Profile, at: float) -> bool:
        """Store a profiled step of a trial.

        Returns:
            False if the step is stored already, or MOST_PROFILES of the trial are.
        """
        with locked(self._database, job_id) as (run, _):
            change_job(run, job_id, last_contact_at=at)
            found = run(PROFILED_STEPS, job_id=job_id, trial=index)
            if not found:
                raise UnknownTrial(index)
            trial_id, known = found[0].id, [row.step for row in found if row.step is not None]
            if profile.step in known or len(known) >= MOST_PROFILES:
                return False
            add(run, ProfileRow, trial_id=trial_id, step=profile.step, content=asdict(profile))
            return True

    def of(self, job_id: str, index: int | None = None) -> list[tuple[int, Profile]]:
        """Pairs of trial index and profile, of one trial or all, in step order."""
        which = PROFILES if index is None else PROFILES.where(TrialRow.index == index)
        in_order = which.order_by(TrialRow.index, ProfileRow.step)
        found = self._database.read(in_order, job_id=job_id)
        if not found:
            check(self._database.read, job_id, index)
        return [(trial, PROFILE.validate_python(content)) for trial, content in found]

    def latest(self, job_id: str, count: int, trial: int | None = None) -> list[Profile]:
        """The last profiled steps of a trial, by default of the newest profiled one; in order."""
        found = self._database.read(LATEST, job_id=job_id, trial=trial, most=count)
        return [PROFILE.validate_python(row.content) for row in reversed(found)]


def _key(event: Event) -> str | None:
    """Return a key that is equal for a report that is sent again; None if the event names
    no step."""
    if event.step is None:
        return None
    told = [event.kind, event.trial, event.step, event.message]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _has_room(run: Run, job_id: str, event: Event) -> bool:
    """Whether the event may be stored; deletes an older one of its kind if it must."""
    likes = select(EventRow.id).where(
        EventRow.job_id == job_id,
        EventRow.kind == event.kind,
        EventRow.trial == event.trial if event.trial is not None else EventRow.trial.is_(None),
    )
    older = [row.id for row in run(likes.order_by(EventRow.id.desc()).offset(MOST_EVENTS - 1))]
    if older and event.kind == "switched":
        return False
    if older:
        run(delete(EventRow).where(EventRow.id.in_(older)))
    return True

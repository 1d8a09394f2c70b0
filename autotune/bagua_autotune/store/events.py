"""Events: what the ranks report of a job besides its steps."""

from __future__ import annotations

import hashlib
import json
from typing import Any, cast

from sqlalchemy import bindparam, delete, func, select
from sqlalchemy.orm import Session

from bagua_autotune.model.job import Event, EventKind
from bagua_autotune.store.database import Database
from bagua_autotune.store.rows import check_job, locked_row
from bagua_autotune.store.statement import Statement
from bagua_autotune.store.tables import EventRow

# Of one kind and one trial.
MOST_EVENTS = 100
# Statements that are used often are built once.
SWITCH_SECONDS = Statement(
    select(EventRow.trial, func.sum(EventRow.seconds))
    .where(
        EventRow.job_id == bindparam("job_id"),
        EventRow.kind == "switched",
        EventRow.trial.is_not(None),
        EventRow.seconds.is_not(None),
    )
    .group_by(EventRow.trial)
)
COUNT_EVENTS = Statement(
    select(func.count()).where(
        EventRow.job_id == bindparam("job_id"), EventRow.kind == bindparam("kind")
    )
)


class Events:
    """The part of the store that keeps events."""

    database: Database

    def add_event(self, job_id: str, event: Event) -> float | None:
        """Store the event, unless it was reported before.

        Of one kind and trial the newest MOST_EVENTS are kept; of switches, whose time counts as
        cost, the first ones.

        Returns:
            When it was reported before, in seconds since the epoch; None if it is new.
        """
        key = _key(event)
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
        """All events, or so many of the newest; oldest first."""
        with self.database.reading() as session:
            check_job(session, job_id)
            query = select(EventRow).where(EventRow.job_id == job_id)
            found = session.scalars(query.order_by(EventRow.id.desc()).limit(newest)).all()
            return [_event(row) for row in reversed(found)]

    def events_after(self, job_id: str, key: int, limit: int) -> list[tuple[int, Event]]:
        """Return at most so many events after ``key`` (0: from the first on), oldest first, with
        their keys.
        """
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

    def last_event(self, job_id: str, kind: EventKind) -> Event | None:
        """The newest event of this kind."""
        query = select(EventRow).where(EventRow.job_id == job_id, EventRow.kind == kind)
        with self.database.reading() as session:
            row = session.scalar(query.order_by(EventRow.id.desc()).limit(1))
            return _event(row) if row else None


def _key(event: Event) -> str | None:
    """Return a key that is equal for a report that is sent again; None if the event names
    no step.
    """
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

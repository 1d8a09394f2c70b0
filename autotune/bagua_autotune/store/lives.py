"""Lives: the jobs of one training that was started again.

The job of each life stays as it is; a row beside it names the job of the previous life.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy import bindparam, func, or_, select, update
from sqlalchemy.exc import IntegrityError

from bagua_autotune.store.engine.database import Database, Statement
from bagua_autotune.store.engine.tables import JobRow, LifeRow
from bagua_autotune.store.errors import UnknownJob
from bagua_autotune.store.jobs import NEWEST_FIRST
from bagua_autotune.store.rows import job_row, locked, locked_row, the_row

PLACE = Statement(
    select(LifeRow.previous, LifeRow.first, LifeRow.number)
    .select_from(JobRow)
    .outerjoin(LifeRow, LifeRow.job_id == JobRow.id)
    .where(JobRow.id == bindparam("job_id"))
)


@dataclass(frozen=True)
class Place:
    """A job's place among the lives of its training.

    Attributes:
        previous: the job of the previous life; None: this is the first.
        first: the job of the first life, which may be deleted.
        number: counted from 1.
    """

    previous: str | None
    first: str
    number: int


class Lives:
    """The part of the store that keeps lives.

    Every method that takes a ``job_id`` raises UnknownJob if there is no such job.
    """

    database: Database

    def place_of(self, job_id: str) -> Place:
        """The job's place among the lives of its training."""
        previous, first, number = the_row(self.database.ask(PLACE, job_id=job_id), job_id)
        return Place(None, job_id, 1) if first is None else Place(previous, first, number)

    def lives(self, job_id: str) -> list[tuple[str, int]]:
        """All stored lives of its training in order, each with its number."""
        first = self.place_of(job_id).first
        is_one = or_(LifeRow.first == first, JobRow.id == first)
        number = func.coalesce(LifeRow.number, 1)
        query = select(JobRow.id, number).outerjoin(LifeRow, LifeRow.job_id == JobRow.id)
        with self.database.reading() as session:
            found = session.execute(query.where(is_one).order_by(number, JobRow.created_at))
            return [(each, int(place)) for each, place in found]

    def following(self, job_id: str) -> str | None:
        """The job of the next life; None if there is none."""
        query = select(LifeRow.job_id).where(LifeRow.previous == job_id)
        with self.database.reading() as session:
            return session.scalar(query)

    def continue_job(self, previous: str, job_id: str) -> bool:
        """Make a job, with all its later lives, the next life of an earlier one.

        Returns:
            False, with nothing changed, if one of the two has another neighbour already.
        """
        before = self.place_of(previous)
        place = Place(previous, before.first, before.number + 1)
        return before.first != job_id and self.enter(job_id, place)

    def part(self, job_id: str) -> None:
        """Separate this job from the later job that was taken for its next life, if there
        is one."""
        with locked(self.database, job_id) as (session, _):
            row = session.scalar(select(LifeRow).where(LifeRow.previous == job_id))
            if row is None:
                return
            following, first, before = row.job_id, row.first, row.number - 1
            session.delete(row)
            session.flush()
            later = (LifeRow.first == first) & (LifeRow.number > before + 1)
            changes = {"first": following, "number": LifeRow.number - before}
            session.execute(update(LifeRow).where(later).values(changes))
            locked_row(session, following)

    def enter(self, job_id: str, place: Place) -> bool:
        """Give a job, with all its later lives, this place, which has a previous life. False, with
        nothing changed, if one of the two has another neighbour already."""
        try:
            with self.database.writing() as session:
                # The later one first: whoever registers it may have locked it already.
                locked_row(session, job_id)
                session.add(LifeRow(job_id=job_id, **vars(place)))
                session.flush()
                later = update(LifeRow).where(LifeRow.first == job_id)
                number = LifeRow.number + place.number - 1
                session.execute(later.values(first=place.first, number=number))
                if place.previous is not None:
                    with suppress(UnknownJob):  # deleted since
                        locked_row(session, place.previous)
        except IntegrityError:  # one of the two has another neighbour already
            return False
        return True

    def alike(self, name: str, model_key: str, limit: int) -> list[str]:
        """The jobs of /api/v2 of that name and model, newest first."""
        query = select(JobRow.id).where(
            JobRow.protocol == "v2", JobRow.name == name, JobRow.model_key == model_key
        )
        with self.database.reading() as session:
            return list(session.scalars(query.order_by(*NEWEST_FIRST).limit(limit)))

    def begun_since_silence(self, job_id: str) -> str | None:
        """The first job of the same name and model registered after this one's last report, unless
        it is the next life of another."""
        with self.database.reading() as session:
            row = job_row(session, job_id)
            query = select(JobRow.id).outerjoin(LifeRow, LifeRow.job_id == JobRow.id)
            query = query.where(
                JobRow.protocol == row.protocol,
                JobRow.name == row.name,
                JobRow.model_key == row.model_key,
                JobRow.created_at > row.last_contact_at,
                JobRow.id != job_id,
                LifeRow.job_id.is_(None),
            )
            return session.scalar(query.order_by(JobRow.created_at).limit(1))

"""Lives: the jobs of one training that was started again.

The job of each life stays as it is; a row beside it names the job of the previous life.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy import bindparam, delete, func, or_, select, update

from bagua_autotune.store.engine.database import Database
from bagua_autotune.store.engine.tables import JobRow, LifeRow
from bagua_autotune.store.errors import UnknownJob
from bagua_autotune.store.rows import OF_ID, add_new, lock, locked, the_row

PLACE = (
    select(LifeRow.previous, LifeRow.first, LifeRow.number)
    .select_from(JobRow)
    .outerjoin(LifeRow, LifeRow.job_id == JobRow.id)
    .where(OF_ID)
)
KEYS = select(JobRow.protocol, JobRow.name, JobRow.model_key, JobRow.last_contact_at).where(OF_ID)
NUMBER = func.coalesce(LifeRow.number, 1)
LIVES = (
    select(JobRow.id, NUMBER)
    .outerjoin(LifeRow, LifeRow.job_id == JobRow.id)
    .where(or_(LifeRow.first == bindparam("first"), JobRow.id == bindparam("first")))
    .order_by(NUMBER, JobRow.created_at)
)
FOLLOWING = select(LifeRow.job_id, LifeRow.first, LifeRow.number).where(
    LifeRow.previous == bindparam("previous")
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


class StoredLives:
    """Every method that takes a ``job_id`` raises UnknownJob if there is no such job."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def place_of(self, job_id: str) -> Place:
        """The job's place among the lives of its training."""
        previous, first, number = the_row(self._database.read(PLACE, job_id=job_id), job_id)
        return Place(None, job_id, 1) if first is None else Place(previous, first, number)

    def of(self, job_id: str) -> list[tuple[str, int]]:
        """All stored lives of its training in order, each with its number."""
        found = self._database.read(LIVES, first=self.place_of(job_id).first)
        return [(each, int(number)) for each, number in found]

    def following(self, job_id: str) -> str | None:
        """The job of the next life; None if there is none."""
        found = self._database.read(FOLLOWING, previous=job_id)
        return found[0].job_id if found else None

    def join(self, previous: str, job_id: str) -> bool:
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
        with locked(self._database, job_id) as (run, _):
            found = run(FOLLOWING, previous=job_id)
            if not found:
                return
            following, first, number = found[0]
            run(delete(LifeRow).where(LifeRow.job_id == following))
            later = update(LifeRow).where(LifeRow.first == first, LifeRow.number > number)
            run(later.values(first=following, number=LifeRow.number - (number - 1)))
            lock(run, following)

    def enter(self, job_id: str, place: Place) -> bool:
        """Give a job, with all its later lives, this place, which has a previous life. False, with
        nothing changed, if one of the two has another neighbour already."""
        with self._database.writing() as run:
            # The later one first: whoever registers it may have locked it already.
            lock(run, job_id)
            if not add_new(run, LifeRow, job_id=job_id, **vars(place)):
                return False
            later = update(LifeRow).where(LifeRow.first == job_id)
            run(later.values(first=place.first, number=LifeRow.number + (place.number - 1)))
            if place.previous is not None:
                with suppress(UnknownJob):  # deleted since
                    lock(run, place.previous)
        return True

    def begun_since_silence(self, job_id: str) -> str | None:
        """The first job of the same name and model registered after this one's last report, unless
        it is the next life of another."""
        ended = the_row(self._database.read(KEYS, job_id=job_id), job_id)
        query = (
            select(JobRow.id)
            .outerjoin(LifeRow, LifeRow.job_id == JobRow.id)
            .where(
                JobRow.protocol == ended.protocol,
                JobRow.name == ended.name,
                JobRow.model_key == ended.model_key,
                JobRow.created_at > ended.last_contact_at,
                JobRow.id != job_id,
                LifeRow.job_id.is_(None),
            )
            .order_by(JobRow.created_at)
            .limit(1)
        )
        found = self._database.read(query)
        return found[0].id if found else None

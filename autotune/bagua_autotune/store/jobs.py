"""Jobs: listing, registering, ending and resuming them, and whether they have changed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import ColumnElement, Select, bindparam, case, func, null, select, update
from sqlalchemy.exc import SQLAlchemyError

from bagua_autotune.model.job import (
    CUT_SHORT,
    Api,
    Event,
    Inherited,
    Job,
    JobSpec,
    Result,
    Saved,
    Trial,
)
from bagua_autotune.store import rows
from bagua_autotune.store.engine.database import Database
from bagua_autotune.store.engine.tables import (
    ClaimRow,
    EventRow,
    JobRow,
    LifeRow,
    ProfileRow,
    TrialRow,
)
from bagua_autotune.store.errors import JobConflict, UnknownJob
from bagua_autotune.store.rows import OF_ID, change_job, locked, the_row
from bagua_wire.cutting import Tensor
from bagua_wire.messages import BEING_TUNED, JobPhase

logger = logging.getLogger(__name__)

# Jobs of our own client.
TUNED_HERE: tuple[Api, ...] = ("v2",)
# So many unreadable jobs in a row do not hide an older one.
MOST_UNREADABLE = 9
NEWEST_FIRST = JobRow.created_at.desc(), JobRow.id
JOB = select(*rows.JOB_COLUMNS).where(OF_ID)
REGISTERED = select(JobRow.protocol, JobRow.spec, JobRow.tensors).where(OF_ID)
TOUCH = update(JobRow).where(OF_ID).values(last_contact_at=bindparam("at")).returning(JobRow.id)

TENSORS = select(JobRow.tensors).where(OF_ID)


class Contact(NamedTuple):
    """The little of a job that a list needs; times are seconds since the epoch."""

    id: str
    name: str
    phase: str
    revision: int
    created_at: float
    last_contact_at: float
    ended_at: float | None

    @property
    def version(self) -> tuple[float, int]:
        """A version that changes whenever the job is written; a later job with the same id has
        another, too."""
        return self.created_at, self.revision


CONTACT = tuple(getattr(JobRow, field) for field in Contact._fields)
CLAIM = ClaimRow.job_id == JobRow.id
CONTACT_AND_CLAIM = select(*CONTACT, ClaimRow.until).outerjoin(ClaimRow, CLAIM).where(OF_ID)
TEAM = JobRow.spec["team"].as_string()
# A store has many more jobs that ended than others: the database leaves them out.
CONTACTS_SINCE = (
    select(*CONTACT)
    .where(
        JobRow.last_contact_at >= bindparam("at"),
        JobRow.ended_at.is_(None)
        | (JobRow.phase == "lost")
        | (JobRow.last_contact_at >= bindparam("ended_at")),
    )
    .order_by(*NEWEST_FIRST)
)
LISTED = {
    "of_name": JobRow.name == bindparam("of_name"),
    "of_team": bindparam("of_team") == TEAM,
    "of_after": (JobRow.created_at < bindparam("at"))
    | ((JobRow.created_at == bindparam("at")) & (JobRow.id > bindparam("of_after"))),
}


@lru_cache
def _listed(*names: str) -> Select[Any]:
    is_continued = select(LifeRow.job_id).where(LifeRow.previous == JobRow.id).exists()
    query = select(*CONTACT).where(~is_continued, *(LISTED[name] for name in names))
    return query.order_by(*NEWEST_FIRST).limit(bindparam("most"))


class StoredJobs:
    """Every method that takes a ``job_id`` raises UnknownJob if there is no such job."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(
        self,
        job_id: str,
        spec: JobSpec,
        *,
        at: float,
        protocol: Api = "v2",
        data: Any = None,
        first: Trial | None = None,
        inherited: Inherited | None = None,
        model_key: str = "",
        network_key: str = "",
    ) -> bool:
        """Register a job. False, with nothing changed, if the same job is registered already.

        Args:
            first: its first trial.
            inherited: what it takes over from earlier jobs.
            model_key: equal for jobs of the same model, which learn from it; empty: none do.
            network_key: the same for jobs on the same network.

        Raises:
            JobConflict: another job is registered under this id.
        """
        is_new = self._add(
            spec,
            [first] if first else [],
            id=job_id,
            name=spec.name,
            protocol=protocol,
            phase="tuning",
            data=data or {},
            created_at=at,
            last_contact_at=at,
            model_key=model_key,
            network_key=network_key,
            inherited=rows.as_column(inherited),
        )
        if not is_new:
            known = the_row(self._database.read(REGISTERED, job_id=job_id), job_id)
            if (known.protocol, rows.job_spec(known)) != (protocol, spec):
                raise JobConflict(f"job {job_id!r} is already registered with other content")
        return is_new

    def adopt(self, spec: JobSpec, trials: list[Trial], event: Event, **columns: Any) -> bool:
        """Store a copy of another store's job as it is, without its steps. False, with nothing
        changed, if it is known.

        Args:
            columns: of the job, besides those of its registration.
        """
        return self._add(spec, trials, event, name=spec.name, protocol="v2", data={}, **columns)

    def _add(
        self, spec: JobSpec, trials: Iterable[Trial], *events: Event, id: str, **columns: Any
    ) -> bool:
        """Add a job; False, with nothing changed, if there is one of this id."""
        with self._database.writing() as run:
            if not rows.add_new(run, JobRow, id=id, **columns, **rows.spec_columns(spec)):
                return False
            for trial in trials:
                rows.add_trial(run, id, trial)
            for event in events:
                rows.add(run, EventRow, job_id=id, **vars(event))
        return True

    def get(self, job_id: str) -> Job:
        return rows.job_record(the_row(self._database.read(JOB, job_id=job_id), job_id))

    def latest(
        self,
        *,
        finished: bool = False,
        profiled: bool = False,
        protocols: Collection[Api] = TUNED_HERE,
        **keys: str | None,
    ) -> Job | None:
        """The newest job of these protocols with all the given keys, which are columns.

        Args:
            finished: whether it must have a result.
            profiled: whether it must have a profiled step.
        """
        equal = (getattr(JobRow, name) == key for name, key in keys.items() if key is not None)
        query = select(*rows.JOB_COLUMNS).where(JobRow.protocol.in_(protocols), *equal)
        if finished:
            query = query.where(JobRow.result.is_not(null()))
        if profiled:
            profiles = select(ProfileRow.id).join(TrialRow).where(TrialRow.job_id == JobRow.id)
            query = query.where(profiles.exists())
        query = query.order_by(*NEWEST_FIRST).limit(MOST_UNREADABLE + 1)
        return next(read_each(self._database.read(query), rows.job_record), None)

    def alike(self, name: str, model_key: str, limit: int) -> list[Job]:
        """The jobs of /api/v2 of that name and model, newest first."""
        query = select(*rows.JOB_COLUMNS).where(
            JobRow.protocol == "v2", JobRow.name == name, JobRow.model_key == model_key
        )
        found = self._database.read(query.order_by(*NEWEST_FIRST).limit(limit))
        return list(read_each(found, rows.job_record))

    def spec(self, job_id: str) -> JobSpec:
        """What the job is registered with."""
        return rows.job_spec(the_row(self._database.read(REGISTERED, job_id=job_id), job_id))

    def tensors(self, job_id: str) -> list[Tensor]:
        (stored,) = the_row(self._database.read(TENSORS, job_id=job_id), job_id)
        return [Tensor(**tensor) for tensor in stored]

    def contact(self, job_id: str) -> Contact:
        """Return enough to see whether the job has changed, without reading all of it."""
        return self.contact_and_claim(job_id)[0]

    def contact_and_claim(self, job_id: str) -> tuple[Contact, float | None]:
        """The job's contact, and until when a replica has claimed it (see Claims), in one query."""
        *contact, until = the_row(self._database.read(CONTACT_AND_CLAIM, job_id=job_id), job_id)
        return Contact._make(contact), until

    def contacts(
        self,
        name: str | None = None,
        limit: int = 100,
        after: str | None = None,
        team: str | None = None,
    ) -> list[Contact]:
        """Jobs of this name and team, or all, newest first, from the one behind ``after`` on. Of a
        training with several lives only the newest is listed.

        Raises:
            UnknownJob: there is no job ``after``.
        """
        wanted = {"name": name, "team": team, "after": after}
        given = {f"of_{key}": value for key, value in wanted.items() if value is not None}
        at = self.contact(after).created_at if after is not None else None
        found = self._database.read(_listed(*given), **given, at=at, most=limit)
        return [Contact._make(row) for row in found]

    def contacts_since(self, at: float, ended_at: float) -> list[Contact]:
        """The jobs that have reported since then, newest first.

        Args:
            ended_at: of jobs that told of their end, only those that have reported since this.
        """
        found = self._database.read(CONTACTS_SINCE, at=at, ended_at=ended_at)
        return [Contact._make(row) for row in found]

    def count_running(self) -> dict[str | None, int]:
        """How many jobs have not ended, nor been taken for lost: by team, and of no team (None)."""
        columns = TEAM.label("team"), func.count()
        query = select(*columns).where(JobRow.ended_at.is_(None)).group_by("team")
        return dict(self._database.read(query))

    def touch(self, job_id: str, at: float) -> None:
        """Note that the job's ranks still run. Its revision stays, as nothing else has changed."""
        the_row(self._database.write(TOUCH, job_id=job_id, at=at), job_id)

    def count_saved(self, job_id: str, saved: Saved, at: float) -> bool:
        """Add to what the job's speed-up has saved, once: False, with nothing changed but the last
        contact, if a step as late as this is counted already."""
        with locked(self._database, job_id) as (run, job):
            changes: dict[str, Any] = {"last_contact_at": at}
            is_later = saved.step > job.saved.step
            if is_later:
                sum_seconds = job.saved.seconds + saved.seconds
                told = {"step": saved.step, "seconds": sum_seconds}
                changes["data"] = {**job.data, rows.SAVED: told}
            change_job(run, job_id, **changes)
            return is_later

    def widen(self, job_id: str, ranks: int) -> None:
        """Note that the job has at least so many ranks, of one node."""
        with locked(self._database, job_id) as (run, job):
            if job.world_size < ranks:
                ((_, spec, _),) = run(REGISTERED, job_id=job_id)
                wide = {**spec, "world_size": ranks, "ranks_per_node": [ranks]}
                change_job(run, job_id, spec=wide)

    def end(self, job_id: str, at: float) -> None:
        """Note that the training ended; a job that was being tuned gets no further result."""
        with locked(self._database, job_id) as (run, job):
            phase = job.phase if job.phase == "finished" else "ended"
            change_job(run, job_id, ended_at=at, phase=phase)

    def lose_silent(
        self, protocol: Api, before: float, event: Event, *, also_finished: bool = False
    ) -> list[str]:
        """Mark as lost the jobs being tuned whose last report came before then; see end_gone.

        Args:
            also_finished: also the jobs that have a result already.
        """
        phases = (*BEING_TUNED, "finished") if also_finished else BEING_TUNED
        which = JobRow.protocol == protocol, JobRow.phase.in_(phases), JobRow.ended_at.is_(None)
        return self._end("lost", event, *which, JobRow.last_contact_at < before)

    def end_gone(self, job_ids: Collection[str], event: Event) -> list[str]:
        """End those of the jobs that have not ended; the event does not come from their ranks.

        Their last contact stays. Of several replicas only one ends a job.

        Returns:
            The ids of the jobs that this call ended.
        """
        return self._end("ended", event, JobRow.id.in_(job_ids), JobRow.ended_at.is_(None))

    def _end(self, phase: JobPhase, event: Event, *which: ColumnElement[bool]) -> list[str]:
        # There is rarely one, and writers take turns.
        if not self._database.read(select(JobRow.id).where(*which).limit(1)):
            return []
        after = case((JobRow.phase == "finished", JobRow.phase), else_=phase)
        changes = {"phase": after, "ended_at": event.at, "revision": JobRow.revision + 1}
        with self._database.writing() as run:
            found = run(update(JobRow).where(*which).values(changes).returning(JobRow.id))
            for (job_id,) in found:
                rows.add(run, EventRow, job_id=job_id, **vars(event))
        return [job_id for (job_id,) in found]

    def resume(self, job_id: str, at: float) -> None:
        """Note that the training goes on after an end, from the trial where it was."""
        with locked(self._database, job_id) as (run, job):
            changes: dict[str, Any] = {"ended_at": None, "last_contact_at": at}
            if job.ended_at is not None:
                absences = [*job.absences, (job.last_contact_at, at)]
                changes["data"] = {**job.data, rows.ABSENCES: absences[-rows.MOST_ABSENCES :]}
            if job.phase in CUT_SHORT:
                last = rows.last_trial(run, job_id)
                is_confirming = last and (last.round, last.purpose) == (job.round, "confirm")
                changes["phase"] = "confirming" if is_confirming else "tuning"
            change_job(run, job_id, **changes)

    def open_round(self, job_id: str, at: float) -> bool:
        """Begin another round of a finished job; its result stays until there is another.

        Returns:
            False, with nothing changed, unless the job is finished and its training runs.
        """
        with locked(self._database, job_id) as (run, job):
            if job.phase != "finished" or job.ended_at is not None:
                return False
            begun = {"phase": "tuning", "round": job.round + 1, "finished_at": None}
            change_job(run, job_id, last_contact_at=at, **begun)
            return True

    def replace_result(self, job_id: str, result: Result, failed: Trial | None = None) -> None:
        """Replace the result of a job that is finished, or is tuned again and has no trial for that
        yet; nothing happens to others.

        Args:
            failed: the run of what was kept, which is one more trial by now; it is added once.
        """
        with locked(self._database, job_id) as (run, job):
            last = rows.last_trial(run, job_id)
            has_begun = last is not None and last.round == job.round
            if job.phase in CUT_SHORT or (job.phase != "finished" and has_begun):
                return
            change_job(run, job_id, result=rows.result_column(result))
            if failed is not None and failed.index == (last.index + 1 if last else 0):
                rows.add_trial(run, job_id, failed)


Answer = TypeVar("Answer")


def read_each(items: Iterable[Any], read: Callable[[Any], Answer]) -> Iterator[Answer]:
    """What ``read`` returns for each job. Jobs that cannot be read are logged and left out, so that
    they do not hide the others.

    Raises:
        SQLAlchemyError: the store failed, which no single job causes.
    """
    for item in items:
        try:
            answer = read(item)
        except UnknownJob:  # deleted since it was listed
            continue
        except SQLAlchemyError:
            raise
        except Exception as error:
            logger.error("job %s cannot be read and is left out: %r", item.id, error)
            continue
        yield answer

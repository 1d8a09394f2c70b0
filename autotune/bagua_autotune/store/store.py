"""The store's operations on jobs and trials, each one transaction."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, bindparam, case, null, select, update
from sqlalchemy.exc import IntegrityError

from bagua_autotune.model.buckets import Tensor
from bagua_autotune.model.job import (
    BEING_TUNED,
    CUT_SHORT,
    OVER,
    Event,
    Inherited,
    Job,
    JobPhase,
    JobSpec,
    Protocol,
    Result,
    Trial,
)
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.store import records
from bagua_autotune.store.database import Database
from bagua_autotune.store.errors import JobConflict, UnknownJob, UnknownTrial
from bagua_autotune.store.isolation import read_each
from bagua_autotune.store.reports import TRIALS, Reports
from bagua_autotune.store.rows import (
    check_job,
    job_row,
    last_trial_row,
    locked_row,
    start,
    trial_row,
)
from bagua_autotune.store.tables import EventRow, JobRow, ProfileRow, SchemaRow, TrialRow

# So many jobs in a row that cannot be read do not hide the one before.
MOST_UNREADABLE = 9
# Put together once, for what is read again and again.
NEWEST_FIRST = JobRow.created_at.desc(), JobRow.id
JOB = select(*records.JOB_COLUMNS).where(JobRow.id == bindparam("job_id"))


@dataclass(frozen=True)
class Step:
    """One move of a job: its open trial closes (or there is none), something follows.

    Exactly one of ``estimate`` and ``failure`` is set when a trial closes, and one of
    ``next_trial`` and ``result`` follows, or none where that is decided later.
    """

    at: float
    closes: int | None = None
    estimate: Estimate | None = None
    failure: str | None = None
    next_trial: Trial | None = None
    result: Result | None = None


class Store(Reports):
    """Jobs, their trials, and what the ranks told of them, in one database.

    Every method that takes a ``job_id`` raises UnknownJob if there is no such job.
    """

    def __init__(self, url: str, *, as_found: bool = False) -> None:
        super().__init__(Database(url, as_found=as_found))

    def close(self) -> None:
        self.database.close()

    def check(self) -> None:
        """Raise SQLAlchemyError unless the database answers a query."""
        with self.database.reading() as session:
            session.scalar(select(SchemaRow.version))

    # Jobs

    def create_job(
        self,
        job_id: str,
        spec: JobSpec,
        *,
        at: float,
        protocol: Protocol = "v2",
        data: Any = None,
        first: Trial | None = None,
        inherited: Inherited | None = None,
        model_key: str = "",
        network_key: str = "",
    ) -> bool:
        """Register a job. False, with nothing changed, if it exists already with this content.

        Args:
            first: the trial that it begins with.
            inherited: what it knows from earlier jobs.
            model_key: by which later jobs of the same model find it; empty: by none.
            network_key: the same for jobs on the same network.

        Raises:
            JobConflict: it exists with other content.
        """
        content, tensors = records.spec_columns(spec)
        row = JobRow(
            id=job_id,
            name=spec.name,
            protocol=protocol,
            phase="tuning",
            spec=content,
            tensors=tensors,
            data=data or {},
            created_at=at,
            last_contact_at=at,
            fingerprint=spec.fingerprint,
            model_key=model_key,
            network_key=network_key,
            inherited=inherited.model_dump(mode="json") if inherited else None,
        )
        try:
            with self.database.writing() as session:
                if session.get(JobRow, job_id) is None:
                    session.add(row)
                    if first:
                        session.add(_new_trial(job_id, first))
                    return True
        except IntegrityError:
            pass  # another replica registered it at the same moment
        with self.database.reading() as session:
            known = job_row(session, job_id)
            if (known.protocol, records.job_spec(known)) != (protocol, spec):
                raise JobConflict(f"job {job_id!r} is registered with other content")
        return False

    def job(self, job_id: str) -> Job:
        with self.database.reading() as session:
            row = session.connection().execute(JOB, {"job_id": job_id}).one_or_none()
            if row is None:
                raise UnknownJob(job_id)
            return records.job_record(row)

    def jobs(self, name: str | None = None, limit: int = 100) -> list[Job]:
        """Newest first."""
        query = select(*records.JOB_COLUMNS).order_by(*NEWEST_FIRST).limit(limit)
        if name is not None:
            query = query.where(JobRow.name == name)
        with self.database.reading() as session:
            rows: Iterable[Any] = session.connection().execute(query)
            return list(read_each(rows, records.job_record))

    def latest_job(
        self,
        *,
        fingerprint: str | None = None,
        model_key: str | None = None,
        network_key: str | None = None,
        name: str | None = None,
        finished: bool = False,
        profiled: bool = False,
    ) -> Job | None:
        """The newest job of /api/v2 that has all the keys given.

        Args:
            finished: whether only a job with a result will do.
            profiled: whether only a job with a profiled step will do.
        """
        keys = {
            JobRow.fingerprint: fingerprint,
            JobRow.model_key: model_key,
            JobRow.network_key: network_key,
            JobRow.name: name,
        }
        query = select(*records.JOB_COLUMNS).where(JobRow.protocol == "v2")
        query = query.where(*(column == key for column, key in keys.items() if key is not None))
        if finished:
            query = query.where(JobRow.result.is_not(null()))
        if profiled:
            profiles = select(ProfileRow.id).join(TrialRow).where(TrialRow.job_id == JobRow.id)
            query = query.where(profiles.exists())
        newest = query.order_by(*NEWEST_FIRST).limit(MOST_UNREADABLE + 1)
        with self.database.reading() as session:
            rows: Iterable[Any] = session.connection().execute(newest)
            return next(read_each(rows, records.job_record), None)

    def tensors(self, job_id: str) -> list[Tensor]:
        with self.database.reading() as session:
            check_job(session, job_id)
            stored = session.scalar(select(JobRow.tensors).where(JobRow.id == job_id))
            return [Tensor.model_validate(tensor) for tensor in stored or ()]

    def touch(self, job_id: str, at: float) -> None:
        """Note that the job's ranks were heard of: nothing new of it, so its revision stays."""
        with self.database.writing() as session:
            heard = update(JobRow).where(JobRow.id == job_id).values(last_contact_at=at)
            if session.scalar(heard.returning(JobRow.id)) is None:
                raise UnknownJob(job_id)

    def end_job(self, job_id: str, at: float) -> None:
        """Training ended; a job that was still tuning stays without another result."""
        with self.database.writing() as session:
            row = locked_row(session, job_id)
            row.ended_at = at
            if row.phase != "finished":
                row.phase = "ended"

    def lose_silent(
        self, protocol: Protocol, before: float, event: Event, *, also_finished: bool = False
    ) -> list[str]:
        """The jobs that are being tuned and were last heard of before then are lost; see end_gone.

        Args:
            also_finished: those as well of which a result is known already.
        """
        phases = (*BEING_TUNED, "finished") if also_finished else BEING_TUNED
        which = JobRow.protocol == protocol, JobRow.phase.in_(phases), JobRow.ended_at.is_(None)
        return self._end("lost", event, *which, JobRow.last_contact_at < before)

    def end_gone(self, job_ids: Collection[str], event: Event) -> list[str]:
        """End those of the jobs that have not ended, by an event that is not their ranks' own.

        It is no contact with them. Of several replicas one ends a job.

        Returns:
            The ids of those that it ended.
        """
        return self._end("ended", event, JobRow.id.in_(job_ids), JobRow.ended_at.is_(None))

    def _end(self, phase: JobPhase, event: Event, *which: ColumnElement[bool]) -> list[str]:
        with self.database.reading() as session:  # mostly there is none, and writers take turns
            if session.scalar(select(JobRow.id).where(*which).limit(1)) is None:
                return []
        after = case((JobRow.phase == "finished", JobRow.phase), else_=phase)
        changes = {"phase": after, "ended_at": event.at, "revision": JobRow.revision + 1}
        statement = update(JobRow).where(*which).values(changes).returning(JobRow.id)
        with self.database.writing() as session:
            ended = list(session.scalars(statement))
            session.add_all(EventRow(job_id=job_id, **vars(event)) for job_id in ended)
        return ended

    def resume_job(self, job_id: str, at: float) -> None:
        """Training goes on after an end, from the trial at which it stood."""
        with self.database.writing() as session:
            row = locked_row(session, job_id)
            if row.ended_at is not None:
                absences = [*row.data.get(records.ABSENCES, ()), [row.last_contact_at, at]]
                row.data = {**row.data, records.ABSENCES: absences[-records.MOST_ABSENCES :]}
            row.ended_at, row.last_contact_at = None, at
            if row.phase in CUT_SHORT:
                last = last_trial_row(session, job_id)
                is_confirming = last and (last.round, last.purpose) == (row.round, "confirm")
                row.phase = "confirming" if is_confirming else "tuning"

    def open_round(self, job_id: str, at: float) -> bool:
        """Tune a finished job again; its last result stays until there is another.

        Returns:
            False, with nothing changed, unless it is finished and its training goes on.
        """
        with self.database.writing() as session:
            row = locked_row(session, job_id)
            if row.phase != "finished" or row.ended_at is not None:
                return False
            row.phase, row.round = "tuning", row.round + 1
            row.finished_at, row.last_contact_at = None, at
            return True

    def replace_result(self, job_id: str, result: Result) -> None:
        """Let a finished job have another result. Nothing happens unless it is finished."""
        with self.database.writing() as session:
            row = locked_row(session, job_id)
            if row.phase == "finished":
                row.result = records.result_column(result)

    # Trials

    def trials(self, job_id: str) -> list[Trial]:
        """In the order of their indices."""
        with self.database.reading() as session:
            rows = session.connection().execute(TRIALS, {"job_id": job_id}).all()
            found = [records.trial_record(row[2:]) for row in rows]
            if not found:
                check_job(session, job_id)
            return found

    def trial(self, job_id: str, index: int) -> Trial:
        """Raises UnknownTrial if there is none."""
        with self.database.reading() as session:
            check_job(session, job_id)
            query = TRIALS.where(TrialRow.index == index)
            row = session.connection().execute(query, {"job_id": job_id}).one_or_none()
            if row is None:
                raise UnknownTrial(index)
            return records.trial_record(row[2:])

    def start_trial(self, job_id: str, index: int, at: float) -> None:
        """The ranks run this trial now. Nothing happens unless it is proposed."""
        with self.database.writing() as session:
            locked_row(session, job_id)
            start(trial_row(session, job_id, index), at)

    def advance(self, job_id: str, step: Step) -> bool:
        """Take a step that was decided on an earlier view of the job.

        Returns:
            False, with nothing changed, if the job has moved on since that view.
        """
        with self.database.writing() as session:
            row = locked_row(session, job_id)
            last = last_trial_row(session, job_id)
            open_index = last.index if last and last.state in ("proposed", "running") else None
            if row.phase in OVER or open_index != step.closes:
                return False
            expected = last.index + 1 if last else 0
            if step.next_trial and step.next_trial.index != expected:
                return False
            if last and step.closes is not None:
                _close(last, step)
            if step.next_trial:
                session.add(_new_trial(job_id, step.next_trial))
                row.phase = _phase(step.next_trial)
            if step.result:
                row.phase, row.finished_at = "finished", step.at
                row.result = records.result_column(step.result)
            return True

    def update_estimate(self, job_id: str, index: int, measured: Estimate) -> None:
        """Replace a measured trial's estimate, after data that came late."""
        with self.database.writing() as session:
            locked_row(session, job_id)
            row = trial_row(session, job_id, index)
            if row.state == "measured":
                records.write_estimate(row, measured)


def _close(row: TrialRow, step: Step) -> None:
    row.ended_at = step.at
    row.failure = step.failure
    row.state = "measured" if step.failure is None else "failed"
    if step.estimate is not None:
        records.write_estimate(row, step.estimate)


def _new_trial(job_id: str, trial: Trial) -> TrialRow:
    return TrialRow(
        job_id=job_id,
        index=trial.index,
        purpose=trial.purpose,
        state="proposed",
        configuration=dict(trial.configuration),
        steps=0,
        outliers=0,
        round=trial.round,
    )


def _phase(trial: Trial) -> JobPhase:
    return "confirming" if trial.purpose == "confirm" else "tuning"

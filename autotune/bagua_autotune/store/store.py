"""The store's operations, each one transaction.

Every writer of a job locks the job's row first (SELECT ... FOR UPDATE; on SQLite writers
take turns anyway), so that threads and replicas may write to the same job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import delete, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, undefer

from bagua_autotune.model.buckets import Tensor
from bagua_autotune.model.job import (
    Event,
    Job,
    JobPhase,
    JobSpec,
    Observation,
    Protocol,
    Result,
    Trial,
)
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.store import records
from bagua_autotune.store.database import Database
from bagua_autotune.store.errors import JobConflict, UnknownJob, UnknownTrial
from bagua_autotune.store.isolation import read_each
from bagua_autotune.store.tables import (
    EventRow,
    JobRow,
    ObservationRow,
    SchemaRow,
    TrialRow,
)


@dataclass(frozen=True)
class Step:
    """One move of a job: its open trial closes (or there is none), something follows.

    Exactly one of ``estimate`` and ``failure`` is set when a trial closes, and exactly one
    of ``next_trial`` and ``result`` follows.
    """

    at: float
    closes: int | None = None
    estimate: Estimate | None = None
    failure: str | None = None
    next_trial: Trial | None = None
    result: Result | None = None


class PrunedJob(NamedTuple):
    """What is told of a job that was deleted."""

    id: str
    name: str
    phase: str
    last_contact_at: float


class Store:
    """Jobs, trials, observations and events in one database.

    Every method that takes a ``job_id`` raises UnknownJob if there is no such job.
    """

    def __init__(self, url: str, *, must_exist: bool = False) -> None:
        self.database = Database(url, must_exist=must_exist)

    def close(self) -> None:
        self.database.close()

    def check(self) -> None:
        """Raise SQLAlchemyError unless the database answers a query."""
        with self.database.reading() as session:
            session.scalar(select(SchemaRow.version))

    # Jobs

    def create_job(
        self, job_id: str, spec: JobSpec, *, at: float, protocol: Protocol = "v2", data: Any = None
    ) -> bool:
        """Register a job. False if it exists already with this content.

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
        )
        try:
            with self.database.writing() as session:
                known = session.get(JobRow, job_id, options=[undefer(JobRow.tensors)])
                if known is None:
                    session.add(row)
                    return True
                same = (known.protocol, known.spec, known.tensors) == (protocol, content, tensors)
        except IntegrityError:  # another replica registered it at the same moment
            return self.create_job(job_id, spec, at=at, protocol=protocol, data=data)
        if not same:
            raise JobConflict(f"job {job_id!r} is registered with other content")
        return False

    def job(self, job_id: str) -> Job:
        with self.database.reading() as session:
            return records.job_record(job_row(session, job_id))

    def jobs(self, name: str | None = None, limit: int = 100) -> list[Job]:
        """Newest first."""
        query = select(JobRow).order_by(JobRow.created_at.desc(), JobRow.id).limit(limit)
        if name is not None:
            query = query.where(JobRow.name == name)
        with self.database.reading() as session:
            return list(read_each(session.scalars(query), records.job_record))

    def active_jobs(self, since: float) -> list[Job]:
        """Jobs that have not ended and were heard of since then, newest first."""
        query = select(JobRow).where(JobRow.ended_at.is_(None), JobRow.last_contact_at >= since)
        with self.database.reading() as session:
            rows = session.scalars(query.order_by(JobRow.created_at.desc(), JobRow.id))
            return list(read_each(rows, records.job_record))

    def tensors(self, job_id: str) -> list[Tensor]:
        with self.database.reading() as session:
            job_row(session, job_id)
            stored = session.scalar(select(JobRow.tensors).where(JobRow.id == job_id))
            return [Tensor.model_validate(tensor) for tensor in stored or ()]

    def touch(self, job_id: str, at: float) -> None:
        """Note that the job's ranks were heard of."""
        with self.database.writing() as session:
            locked_row(session, job_id).last_contact_at = at

    def end_job(self, job_id: str, at: float) -> None:
        """Training ended; a job that was still tuning stays without a result."""
        with self.database.writing() as session:
            row = locked_row(session, job_id)
            row.ended_at = at
            if row.phase != "finished":
                row.phase = "ended"

    def resume_job(self, job_id: str, at: float) -> None:
        """Training goes on after an end, from the trial at which it stood."""
        with self.database.writing() as session:
            row = locked_row(session, job_id)
            row.ended_at, row.last_contact_at = None, at
            if row.phase == "ended":
                last = _last_trial(session, job_id)
                row.phase = "confirming" if last and last.purpose == "confirm" else "tuning"

    def replace_result(self, job_id: str, result: Result) -> None:
        """Let a finished job have another result. Nothing happens unless it is finished."""
        with self.database.writing() as session:
            row = locked_row(session, job_id)
            if row.phase == "finished":
                row.result = records.result_column(result)

    def prune(self, before: float) -> list[PrunedJob]:
        """Delete the jobs last heard of before then, with all that belongs to them."""
        columns = (JobRow.id, JobRow.name, JobRow.phase, JobRow.last_contact_at)
        statement = delete(JobRow).where(JobRow.last_contact_at < before).returning(*columns)
        with self.database.writing() as session:
            return [PrunedJob(*row) for row in session.execute(statement)]

    # Trials

    def trials(self, job_id: str) -> list[Trial]:
        """In the order of their indices."""
        with self.database.reading() as session:
            job_row(session, job_id)
            query = select(TrialRow).where(TrialRow.job_id == job_id).order_by(TrialRow.index)
            return [records.trial_record(row) for row in session.scalars(query)]

    def trial(self, job_id: str, index: int) -> Trial:
        """Raises UnknownTrial if there is none."""
        with self.database.reading() as session:
            job_row(session, job_id)
            return records.trial_record(trial_row(session, job_id, index))

    def start_trial(self, job_id: str, index: int, at: float) -> None:
        """The ranks run this trial now. Nothing happens unless it is proposed."""
        with self.database.writing() as session:
            locked_row(session, job_id)
            _start(trial_row(session, job_id, index), at)

    def advance(self, job_id: str, step: Step) -> bool:
        """Take a step that was decided on an earlier view of the job.

        Returns:
            False, with nothing changed, if the job has moved on since that view.
        """
        with self.database.writing() as session:
            row = locked_row(session, job_id)
            last = _last_trial(session, job_id)
            open_index = last.index if last and last.state in ("proposed", "running") else None
            if row.phase in ("finished", "ended") or open_index != step.closes:
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

    # Observations and events

    def add_observations(
        self, job_id: str, index: int, observations: Sequence[Observation], at: float
    ) -> int:
        """Store the steps that are new to the trial; returns how many were.

        The trial is running from its first observation on.

        Raises:
            UnknownTrial: the job has no such trial.
        """
        with self.database.writing() as session:
            locked_row(session, job_id).last_contact_at = at
            trial = trial_row(session, job_id, index)
            if not observations:
                return 0
            steps = [observation.step for observation in observations]
            query = select(ObservationRow.step).where(
                ObservationRow.trial_id == trial.id,
                ObservationRow.step.between(min(steps), max(steps)),
            )
            known = set(session.scalars(query))
            new = [o for o in observations if o.step not in known]
            session.add_all(
                ObservationRow(trial_id=trial.id, step=o.step, values=list(o.values)) for o in new
            )
            _start(trial, at)
            return len(new)

    def observations(self, job_id: str, index: int | None = None) -> list[tuple[int, Observation]]:
        """Pairs of trial index and observation, of one trial or of all, in step order."""
        query = (
            select(TrialRow.index, ObservationRow.step, ObservationRow.values)
            .join(ObservationRow, ObservationRow.trial_id == TrialRow.id)
            .where(TrialRow.job_id == job_id)
            .order_by(TrialRow.index, ObservationRow.step)
        )
        with self.database.reading() as session:
            job_row(session, job_id)
            if index is not None:
                query = query.where(TrialRow.id == trial_row(session, job_id, index).id)
            return [
                (trial, Observation(step, tuple(values)))
                for trial, step, values in session.execute(query)
            ]

    def count_observations(self, job_id: str) -> int:
        query = select(func.count()).select_from(ObservationRow).join(TrialRow)
        with self.database.reading() as session:
            return session.scalar(query.where(TrialRow.job_id == job_id)) or 0

    def add_event(self, job_id: str, event: Event) -> None:
        with self.database.writing() as session:
            locked_row(session, job_id).last_contact_at = event.at
            session.add(EventRow(job_id=job_id, **vars(event)))

    def events(self, job_id: str) -> list[Event]:
        """Oldest first."""
        with self.database.reading() as session:
            job_row(session, job_id)
            query = select(EventRow).where(EventRow.job_id == job_id).order_by(EventRow.id)
            return [records.event_record(row) for row in session.scalars(query)]


def job_row(session: Session, job_id: str) -> JobRow:
    row = session.get(JobRow, job_id)
    if row is None:
        raise UnknownJob(job_id)
    return row


def locked_row(session: Session, job_id: str) -> JobRow:
    row = session.get(JobRow, job_id, with_for_update=True)
    if row is None:
        raise UnknownJob(job_id)
    return row


def trial_row(session: Session, job_id: str, index: int) -> TrialRow:
    query = select(TrialRow).where(TrialRow.job_id == job_id, TrialRow.index == index)
    row = session.scalar(query)
    if row is None:
        raise UnknownTrial(index)
    return row


def _last_trial(session: Session, job_id: str) -> TrialRow | None:
    query = select(TrialRow).where(TrialRow.job_id == job_id)
    return session.scalar(query.order_by(TrialRow.index.desc()).limit(1))


def _start(trial: TrialRow, at: float) -> None:
    if trial.state == "proposed":
        trial.state, trial.started_at = "running", at


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
    )


def _phase(trial: Trial) -> JobPhase:
    return "confirming" if trial.purpose == "confirm" else "tuning"

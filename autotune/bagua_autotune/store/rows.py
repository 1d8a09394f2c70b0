"""Finding the rows of a job, and locking it.

Every writer of a job locks the job's row first (SELECT ... FOR UPDATE; on SQLite writers
take turns anyway), so that threads and replicas may write to the same job.  That raises the
job's revision: what was computed from a job is right for as long as its revision is the same.
"""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from bagua_autotune.store.errors import UnknownJob, UnknownTrial
from bagua_autotune.store.tables import JobRow, TrialRow


def job_row(session: Session, job_id: str) -> JobRow:
    row = session.get(JobRow, job_id)
    if row is None:
        raise UnknownJob(job_id)
    return row


def check_job(session: Session, job_id: str) -> None:
    """Raise UnknownJob if there is no such job."""
    if session.connection().scalar(select(JobRow.id).where(JobRow.id == job_id)) is None:
        raise UnknownJob(job_id)


def locked_row(session: Session, job_id: str) -> JobRow:
    row = session.get(JobRow, job_id, with_for_update=True)
    if row is None:
        raise UnknownJob(job_id)
    row.revision += 1
    return row


def trial_row(session: Session, job_id: str, index: int) -> TrialRow:
    query = select(TrialRow).where(TrialRow.job_id == job_id, TrialRow.index == index)
    row = session.scalar(query)
    if row is None:
        raise UnknownTrial(index)
    return row


def last_trial_row(session: Session, job_id: str) -> TrialRow | None:
    query = select(TrialRow).where(TrialRow.job_id == job_id)
    return session.scalar(query.order_by(TrialRow.index.desc()).limit(1))


def start(trial: TrialRow, at: float) -> None:
    """The ranks run this trial now. Nothing happens unless it is proposed."""
    if trial.state == "proposed":
        trial.state, trial.started_at = "running", at

"""The rows of jobs and trials: finding and locking them, and turning them into records.

Every writer of a job locks the job's row first (SELECT ... FOR UPDATE; on SQLite writers
take turns anyway), so that threads and replicas may write to the same job.  Locking raises the
job's revision: what was computed from a job holds as long as its revision is the same.

Configurations and specs never change, so each is parsed once: they are read as text, which is the
key of a cache.  (Parsing was most of the cost of reading a job.)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from pydantic import BaseModel
from sqlalchemy import ColumnElement, Text, bindparam, select
from sqlalchemy import cast as sql_cast
from sqlalchemy.orm import Session

from bagua_autotune.model.job import RUNS, Inherited, Job, JobSpec, Limits, Result, Saved, Trial
from bagua_autotune.model.knobs import SPACE
from bagua_autotune.model.memory import Memory
from bagua_autotune.model.runs import RunsSpec
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.store.engine.database import Database, Statement
from bagua_autotune.store.engine.tables import JobRow, TrialRow
from bagua_autotune.store.errors import UnknownJob, UnknownTrial
from bagua_wire.configuration import Configuration

SPECS_KEPT = 4096
CONFIGURATIONS_KEPT = 16_384
# The newest absences, in a job's data.
ABSENCES = "absences"
MOST_ABSENCES = 100
SAVED = "saved"


def as_text(column: Any) -> ColumnElement[str]:
    return sql_cast(column, Text).label(column.key)


# All of a job but its tensors; columns, since mapped objects cost several times more.
JOB_FIELDS = (
    *("id", "name", "protocol", "phase", "revision", "created_at", "last_contact_at", "ended_at"),
    *("finished_at", "round"),
)
JOB_COLUMNS = (
    *(getattr(JobRow, name) for name in JOB_FIELDS),
    *map(as_text, (JobRow.data, JobRow.result, JobRow.inherited, JobRow.spec)),
)
TRIAL_FIELDS = ("index", "purpose", "state", "failure", "started_at", "ended_at", "round")
TRIAL_COLUMNS = (
    *(getattr(TrialRow, name) for name in TRIAL_FIELDS),
    *map(as_text, (TrialRow.configuration, TrialRow.memory)),
    *(TrialRow.cost, TrialRow.standard_error, TrialRow.steps, TrialRow.outliers),
)
# The columns of a trial that a report needs, and then those of its record.
TRIALS = Statement(
    select(TrialRow.id, TrialRow.late_steps, *TRIAL_COLUMNS)
    .where(TrialRow.job_id == bindparam("job_id"))
    .order_by(TrialRow.index)
)


def the_row(found: Sequence[Any], job_id: str) -> Any:
    """The one row that was found of a job; UnknownJob if none was."""
    if not found:
        raise UnknownJob(job_id)
    return found[0]


def job_row(session: Session, job_id: str, is_locked: bool = False) -> JobRow:
    row = session.get(JobRow, job_id, with_for_update=is_locked)
    if row is None:
        raise UnknownJob(job_id)
    return row


def check_job(session: Session, job_id: str) -> None:
    """Raise UnknownJob if there is no such job."""
    if session.connection().scalar(select(JobRow.id).where(JobRow.id == job_id)) is None:
        raise UnknownJob(job_id)


@contextmanager
def locked(database: Database, job_id: str) -> Iterator[tuple[Session, JobRow]]:
    """Open a transaction that writes a job; gives its row."""
    with database.writing() as session:
        yield session, locked_row(session, job_id)


def locked_row(session: Session, job_id: str) -> JobRow:
    row = job_row(session, job_id, is_locked=True)
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


def spec_columns(spec: JobSpec) -> tuple[dict[str, Any], list[Any]]:
    """A registration as the two columns ``spec`` and ``tensors``."""
    content = spec.model_dump(mode="json")
    tensors = content.pop("tensors")
    return content, tensors


def job_spec(row: JobRow) -> JobSpec:
    """The registration."""
    kind = RunsSpec if row.protocol in RUNS else JobSpec
    return kind.model_validate_json(json.dumps({**row.spec, "tensors": row.tensors}))


@lru_cache(maxsize=SPECS_KEPT)
def _spec(text: str) -> dict[str, Any]:
    """What a job has of its registration; all readers share it."""
    spec = json.loads(text)
    return {
        "space": SPACE.validate_json(json.dumps(spec["knobs"])),
        "baseline": Configuration(spec["default_configuration"]),
        "limits": Limits.model_validate(spec["limits"]),
        "ranks_per_node": tuple(spec["ranks_per_node"]),
        **{name: spec[name] for name in ("world_size", "fingerprint", "software")},
        **{name: spec[name] for name in ("run", "fresh", "team") if name in spec},
    }


@lru_cache(maxsize=CONFIGURATIONS_KEPT)
def _configuration(text: str) -> Configuration:
    return Configuration(json.loads(text))


def job_record(row: Sequence[Any]) -> Job:
    """A record of JOB_COLUMNS."""
    data, result, inherited, spec = row[len(JOB_FIELDS) :]
    known = json.loads(data)
    return Job(
        **dict(zip(JOB_FIELDS, row, strict=False)),
        **_spec(spec),
        data=known,
        absences=tuple(map(tuple, known.get(ABSENCES, ()))),
        saved=Saved(**known.get(SAVED, {})),
        result=result_record(json.loads(result)) if result else None,
        inherited=Inherited.model_validate_json(inherited) if inherited else None,
    )


def result_record(column: dict[str, Any]) -> Result:
    return Result(**{**column, "configuration": Configuration(column["configuration"])})


def result_column(result: Result) -> dict[str, Any]:
    return {**asdict(result), "configuration": dict(result.configuration)}


def trial_record(row: Sequence[Any]) -> Trial:
    """A record of TRIAL_COLUMNS."""
    configuration, memory, cost, error, steps, outliers = row[len(TRIAL_FIELDS) :]
    found = None
    if cost is not None:
        found = Estimate(cost, math.inf if error is None else error, steps, outliers)
    return Trial(
        **dict(zip(TRIAL_FIELDS, row, strict=False)),
        configuration=_configuration(configuration),
        estimate=found,
        memory=Memory(**json.loads(memory)) if memory else None,
    )


def new_trial_row(job_id: str, trial: Trial) -> TrialRow:
    """The trial as it is, as a row that is to be added."""
    row = TrialRow(
        job_id=job_id,
        configuration=dict(trial.configuration),
        memory=as_column(trial.memory),
        **{name: getattr(trial, name) for name in TRIAL_FIELDS},
    )
    if trial.estimate is not None:
        write_estimate(row, trial.estimate)
    return row


def as_column(told: BaseModel | None) -> dict[str, Any] | None:
    return told.model_dump(mode="json") if told else None


def write_estimate(row: TrialRow, measured: Estimate) -> None:
    error = measured.standard_error
    row.cost = measured.center
    row.standard_error = error if math.isfinite(error) else None
    row.steps, row.outliers = measured.count, measured.outliers

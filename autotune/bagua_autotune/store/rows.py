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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import ColumnElement, Text, bindparam, select
from sqlalchemy import cast as sql_cast
from sqlalchemy.orm import Session

from bagua_autotune.model.job import (
    Inherited,
    Job,
    JobSpec,
    Limits,
    Result,
    Saved,
    Trial,
)
from bagua_autotune.model.knobs import SPACE, Configuration, Space
from bagua_autotune.model.memory import Memory
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.store.direct import Statement
from bagua_autotune.store.errors import UnknownJob, UnknownTrial
from bagua_autotune.store.tables import JobRow, TrialRow

SPECS_KEPT = 4096
CONFIGURATIONS_KEPT = 16_384
# The newest absences, in a job's data.
ABSENCES = "absences"
MOST_ABSENCES = 100
SAVED = "saved"


def as_text(column: Any) -> ColumnElement[str]:
    return sql_cast(column, Text).label(column.key)


# All of a job but its tensors; columns, since mapped objects cost several times more.
JOB_COLUMNS = (
    JobRow.id,
    JobRow.name,
    JobRow.protocol,
    JobRow.phase,
    JobRow.revision,
    JobRow.created_at,
    JobRow.last_contact_at,
    JobRow.ended_at,
    JobRow.finished_at,
    JobRow.round,
    as_text(JobRow.data),
    as_text(JobRow.result),
    as_text(JobRow.inherited),
    as_text(JobRow.spec),
)
TRIAL_COLUMNS = (
    TrialRow.index,
    TrialRow.purpose,
    TrialRow.state,
    as_text(TrialRow.configuration),
    TrialRow.cost,
    TrialRow.standard_error,
    TrialRow.steps,
    TrialRow.outliers,
    TrialRow.failure,
    TrialRow.started_at,
    TrialRow.ended_at,
    TrialRow.round,
    as_text(TrialRow.memory),
)
# The columns of a trial that a report needs, and then those of its record.
TRIALS = Statement(
    select(TrialRow.id, TrialRow.late_steps, *TRIAL_COLUMNS)
    .where(TrialRow.job_id == bindparam("job_id"))
    .order_by(TrialRow.index)
)


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
    """Note that the ranks run this trial now, if it is still proposed."""
    if trial.state == "proposed":
        trial.state, trial.started_at = "running", at


def spec_columns(spec: JobSpec) -> tuple[dict[str, Any], list[Any]]:
    """A registration as the two columns ``spec`` and ``tensors``."""
    content = spec.model_dump(mode="json")
    tensors = content.pop("tensors")
    if spec.team is None:
        del content["team"]  # as releases before teams store it, which can read it
    return content, tensors


def job_spec(row: JobRow) -> JobSpec:
    """The registration; fields that it lacks have today's defaults."""
    return JobSpec.model_validate_json(json.dumps({**row.spec, "tensors": row.tensors}))


@dataclass(frozen=True)
class _Spec:
    """A job's registration without its tensors; all readers share one object."""

    world_size: int
    ranks_per_node: tuple[int, ...]
    space: Space
    baseline: Configuration
    fingerprint: str
    limits: Limits
    software: dict[str, str]
    run: str | None
    fresh: bool
    team: str | None


@lru_cache(maxsize=SPECS_KEPT)
def _spec(text: str) -> _Spec:
    spec = json.loads(text)
    return _Spec(
        world_size=spec["world_size"],
        ranks_per_node=tuple(spec["ranks_per_node"]),
        space=SPACE.validate_json(json.dumps(spec["knobs"])),
        baseline=Configuration(spec["default_configuration"]),
        fingerprint=spec["fingerprint"],
        limits=Limits.model_validate(spec["limits"]),
        software=spec["software"],
        run=spec.get("run"),
        fresh=spec.get("fresh", False),
        team=spec.get("team"),
    )


@lru_cache(maxsize=CONFIGURATIONS_KEPT)
def _configuration(text: str) -> Configuration:
    return Configuration(json.loads(text))


def job_record(row: Any) -> Job:
    """A record of JOB_COLUMNS."""
    data = json.loads(row.data)
    return Job(
        **vars(_spec(row.spec)),
        id=row.id,
        name=row.name,
        protocol=row.protocol,
        phase=row.phase,
        created_at=row.created_at,
        last_contact_at=row.last_contact_at,
        ended_at=row.ended_at,
        finished_at=row.finished_at,
        result=result_record(json.loads(row.result)) if row.result else None,
        data=data,
        absences=tuple(map(tuple, data.get(ABSENCES, ()))),
        saved=Saved(**data.get(SAVED, {})),
        round=row.round,
        inherited=Inherited.model_validate_json(row.inherited) if row.inherited else None,
        revision=row.revision,
    )


def result_record(column: dict[str, Any]) -> Result:
    return Result(**{**column, "configuration": Configuration(column["configuration"])})


def result_column(result: Result) -> dict[str, Any]:
    return {**asdict(result), "configuration": dict(result.configuration)}


def trial_record(row: Sequence[Any]) -> Trial:
    """A record of TRIAL_COLUMNS."""
    index, purpose, state, configuration, cost, error, steps, outliers, *rest = row
    failure, started_at, ended_at, round_, memory = rest
    found = None
    if cost is not None:
        found = Estimate(cost, math.inf if error is None else error, steps, outliers)
    taken = Memory(**json.loads(memory)) if memory else None
    return Trial(
        index,
        purpose,
        _configuration(configuration),
        state,
        found,
        failure,
        started_at,
        ended_at,
        round_,
        taken,
    )


def new_trial_row(job_id: str, trial: Trial) -> TrialRow:
    return TrialRow(
        job_id=job_id,
        index=trial.index,
        purpose=trial.purpose,
        state="proposed",
        configuration=dict(trial.configuration),
        steps=0,
        outliers=0,
        round=trial.round,
        memory=memory_column(trial.memory),
    )


def failed_trial_row(job_id: str, trial: Trial) -> TrialRow:
    row = new_trial_row(job_id, trial)
    row.state, row.failure = trial.state, trial.failure
    row.started_at, row.ended_at = trial.started_at, trial.ended_at
    return row


def memory_column(memory: Memory | None) -> dict[str, Any] | None:
    return memory.model_dump() if memory else None


def write_estimate(row: TrialRow, measured: Estimate) -> None:
    error = measured.standard_error
    row.cost = measured.center
    row.standard_error = error if math.isfinite(error) else None
    row.steps = measured.count
    row.outliers = measured.outliers

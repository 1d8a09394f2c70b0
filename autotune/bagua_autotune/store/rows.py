"""The rows of jobs and trials: finding, locking, adding and changing them, and turning them into
records.

Every writer of a job locks the job's row first (by an UPDATE; on SQLite writers take turns anyway),
so that threads and replicas may write to the same job.  Locking raises the job's revision: what was
computed from a job holds as long as its revision is the same.

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
from sqlalchemy import ColumnElement, Executable, Text, Update, bindparam, select, update
from sqlalchemy import cast as sql_cast
from sqlalchemy.dialects.postgresql import insert  # its ON CONFLICT is SQLite's, too

from bagua_autotune.model.job import (
    RUNS,
    Inherited,
    Job,
    JobSpec,
    Limits,
    Result,
    RunsSpec,
    Saved,
    Trial,
)
from bagua_autotune.model.knobs import SPACE
from bagua_autotune.model.received import Memory
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.store.engine.database import Database, Run
from bagua_autotune.store.engine.tables import Base, JobRow, TrialRow
from bagua_autotune.store.errors import UnknownJob, UnknownTrial
from bagua_wire.configuration import Configuration

SPECS_KEPT = 4096
CONFIGURATIONS_KEPT = 16_384
# The newest absences, in a job's data.
ABSENCES = "absences"
MOST_ABSENCES = 100
ALL = 2**31 - 1
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
OF_ID = JobRow.id == bindparam("job_id")
LOCK = update(JobRow).where(OF_ID).values(revision=JobRow.revision + 1).returning(*JOB_COLUMNS)
EXISTS = select(JobRow.id).where(OF_ID)
OF_JOB = TrialRow.job_id == bindparam("job_id")
OF_TRIAL = OF_JOB & (TrialRow.index == bindparam("trial"))
# What a report needs of a trial, and then the columns of its record.
TRIALS = select(TrialRow.id, TrialRow.late_steps, *TRIAL_COLUMNS).where(OF_JOB)
TRIALS = TRIALS.order_by(TrialRow.index)
TRIAL = select(*TRIAL_COLUMNS).where(OF_TRIAL)
LAST_TRIAL = select(*TRIAL_COLUMNS).where(OF_JOB).order_by(TrialRow.index.desc()).limit(1)


def the_row(found: Sequence[Any], job_id: str) -> Any:
    """The one row that was found of a job; UnknownJob if none was."""
    if not found:
        raise UnknownJob(job_id)
    return found[0]


def check(run: Run, job_id: str, index: int | None = None) -> None:
    """Raise UnknownJob if there is no such job, and UnknownTrial if it has no such trial."""
    the_row(run(EXISTS, job_id=job_id), job_id)
    if index is not None:
        the_trial(run, job_id, index)


@contextmanager
def locked(database: Database, job_id: str) -> Iterator[tuple[Run, Job]]:
    """Open a transaction that writes a job."""
    with database.writing() as run:
        yield run, lock(run, job_id)


def lock(run: Run, job_id: str) -> Job:
    """Have this transaction alone write the job."""
    return job_record(the_row(run(LOCK, job_id=job_id), job_id))


def the_trial(run: Run, job_id: str, index: int) -> Trial:
    found = run(TRIAL, job_id=job_id, trial=index)
    if not found:
        check(run, job_id)
        raise UnknownTrial(index)
    return trial_record(found[0])


def last_trial(run: Run, job_id: str) -> Trial | None:
    found = run(LAST_TRIAL, job_id=job_id)
    return trial_record(found[0]) if found else None


def add(run: Run, table: type[Base], **columns: Any) -> None:
    """Add a row."""
    run(_insertion(table, tuple(columns)), **columns)


def add_new(run: Run, table: type[Base], **columns: Any) -> bool:
    """Add a row; False, with nothing changed, if there is one that it must not equal."""
    return bool(run(_insertion(table, tuple(columns), is_new=True), **columns))


@lru_cache
def _insertion(table: type[Base], names: tuple[str, ...], is_new: bool = False) -> Executable:
    adding = insert(table).values({name: bindparam(name) for name in names})
    if is_new:
        return adding.on_conflict_do_nothing().returning(*table.__table__.primary_key)
    return adding.inline()


def change_job(run: Run, job_id: str, **columns: Any) -> None:
    """Change these columns of a job."""
    new = {f"new_{name}": value for name, value in columns.items()}
    run(_updated(JobRow, tuple(columns)), job_id=job_id, **new)


def change_trial(run: Run, job_id: str, index: int, **columns: Any) -> None:
    """Change these columns of a trial."""
    new = {f"new_{name}": value for name, value in columns.items()}
    run(_updated(TrialRow, tuple(columns)), job_id=job_id, trial=index, **new)


@lru_cache
def _updated(table: type[JobRow | TrialRow], names: tuple[str, ...]) -> Update:
    which = OF_ID if table is JobRow else OF_TRIAL
    return update(table).where(which).values({name: bindparam(f"new_{name}") for name in names})


def spec_columns(spec: JobSpec) -> dict[str, Any]:
    """The columns of a registration."""
    content = spec.model_dump(mode="json")
    tensors = content.pop("tensors")
    return {"spec": content, "tensors": tensors, "fingerprint": spec.fingerprint}


def job_spec(row: Any) -> JobSpec:
    """The registration, of the columns ``protocol``, ``spec`` and ``tensors``."""
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
    configuration, memory, *estimate = row[len(TRIAL_FIELDS) :]
    return Trial(
        **dict(zip(TRIAL_FIELDS, row, strict=False)),
        configuration=_configuration(configuration),
        estimate=estimate_record(*estimate),
        memory=Memory(**json.loads(memory)) if memory else None,
    )


def add_trial(run: Run, job_id: str, trial: Trial) -> None:
    """Add the trial as it is."""
    add(
        run,
        TrialRow,
        job_id=job_id,
        configuration=dict(trial.configuration),
        memory=as_column(trial.memory),
        **{name: getattr(trial, name) for name in TRIAL_FIELDS},
        **estimate_columns(trial.estimate),
    )


def as_column(told: BaseModel | None) -> dict[str, Any] | None:
    return told.model_dump(mode="json") if told else None


def estimate_columns(measured: Estimate | None) -> dict[str, Any]:
    if measured is None:
        return {"cost": None, "standard_error": None, "steps": 0, "outliers": 0}
    error = measured.standard_error if math.isfinite(measured.standard_error) else None
    counts = {"steps": measured.count, "outliers": measured.outliers}
    return {"cost": measured.center, "standard_error": error, **counts}


def estimate_record(
    cost: float | None, error: float | None, steps: int, outliers: int
) -> Estimate | None:
    """An estimate of those columns."""
    known = math.inf if error is None else error
    return None if cost is None else Estimate(cost, known, steps, outliers)

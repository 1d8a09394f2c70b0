"""Rows to records and back.

What never changes is parsed once: configurations and specs are read as text, by which they are
kept.  (Parsing was most of what it cost to look at a job.)
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, cast

from sqlalchemy import ColumnElement, Row, Text
from sqlalchemy import cast as sql_cast

from bagua_autotune.model.job import (
    Event,
    Inherited,
    Job,
    JobSpec,
    Limits,
    Observation,
    Result,
    Trial,
)
from bagua_autotune.model.knobs import SPACE, Configuration, Space
from bagua_autotune.model.profile import Profile
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.store.tables import EventRow, JobRow, TrialRow

SPECS_KEPT = 4096
CONFIGURATIONS_KEPT = 16_384
# In a job's data; the newest of them.
ABSENCES = "absences"
MOST_ABSENCES = 100


def _as_text(column: Any) -> ColumnElement[str]:
    return sql_cast(column, Text).label(column.key)


# Of a job all but its tensors; as columns, since objects that are mapped cost several times more.
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
    JobRow.data,
    JobRow.result,
    JobRow.inherited,
    _as_text(JobRow.spec),
)
TRIAL_COLUMNS = (
    TrialRow.index,
    TrialRow.purpose,
    TrialRow.state,
    _as_text(TrialRow.configuration),
    TrialRow.cost,
    TrialRow.standard_error,
    TrialRow.steps,
    TrialRow.outliers,
    TrialRow.failure,
    TrialRow.started_at,
    TrialRow.ended_at,
    TrialRow.round,
)


def spec_columns(spec: JobSpec) -> tuple[dict[str, Any], list[Any]]:
    """A registration as the two columns ``spec`` and ``tensors``."""
    content = spec.model_dump(mode="json")
    tensors = content.pop("tensors")
    return content, tensors


def job_spec(row: JobRow) -> JobSpec:
    """The registration; what it left open, or could not know yet, has today's defaults."""
    return JobSpec.model_validate_json(json.dumps({**row.spec, "tensors": row.tensors}))


@dataclass(frozen=True)
class _Spec:
    """What a job is registered with, without its tensors; shared by all that read it."""

    world_size: int
    ranks_per_node: tuple[int, ...]
    space: Space
    baseline: Configuration
    fingerprint: str
    limits: Limits
    software: dict[str, str]


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
    )


@lru_cache(maxsize=CONFIGURATIONS_KEPT)
def _configuration(text: str) -> Configuration:
    return Configuration(json.loads(text))


def job_record(row: Row[Any]) -> Job:
    """Of JOB_COLUMNS."""
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
        result=result_record(row.result) if row.result else None,
        data=row.data,
        absences=tuple(map(tuple, row.data.get(ABSENCES, ()))),
        round=row.round,
        inherited=Inherited.model_validate(row.inherited) if row.inherited else None,
        revision=row.revision,
    )


def result_record(column: dict[str, Any]) -> Result:
    return Result(**{**column, "configuration": Configuration(column["configuration"])})


def result_column(result: Result) -> dict[str, Any]:
    return {**asdict(result), "configuration": dict(result.configuration)}


def trial_record(row: Sequence[Any]) -> Trial:
    """Of TRIAL_COLUMNS."""
    index, purpose, state, configuration, cost, error, steps, outliers, *rest = row
    found = None
    if cost is not None:
        found = Estimate(cost, math.inf if error is None else error, steps, outliers)
    return Trial(index, purpose, _configuration(configuration), state, found, *rest)


def write_estimate(row: TrialRow, measured: Estimate) -> None:
    error = measured.standard_error
    row.cost = measured.center
    row.standard_error = error if math.isfinite(error) else None
    row.steps = measured.count
    row.outliers = measured.outliers


def observation_record(
    step: int, values: list[float | None], compute: list[float | None] | None
) -> Observation:
    return Observation(step, tuple(values), None if compute is None else tuple(compute))


def profile_column(profile: Profile) -> dict[str, Any]:
    return profile.model_dump(mode="json")


def profile_record(column: dict[str, Any]) -> Profile:
    return Profile.model_validate(column, strict=False)


def event_key(event: Event) -> str | None:
    """Equal for what is told again of the same step; None where no step is told."""
    if event.step is None:
        return None
    told = [event.kind, event.trial, event.step, event.message]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def event_record(row: EventRow) -> Event:
    return Event(cast(Any, row.kind), row.trial, row.step, row.message, row.seconds, row.at)

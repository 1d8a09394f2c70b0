"""Rows to records and back."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any, cast

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
from bagua_autotune.model.knobs import SPACE, Configuration
from bagua_autotune.model.profile import Profile
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.store.tables import EventRow, JobRow, TrialRow


def spec_columns(spec: JobSpec) -> tuple[dict[str, Any], list[Any]]:
    """A registration as the two columns ``spec`` and ``tensors``."""
    content = spec.model_dump(mode="json")
    tensors = content.pop("tensors")
    return content, tensors


def job_spec(row: JobRow) -> JobSpec:
    """The registration; what it left open, or could not know yet, has today's defaults."""
    return JobSpec.model_validate_json(json.dumps({**row.spec, "tensors": row.tensors}))


def job_record(row: JobRow) -> Job:
    spec = row.spec
    return Job(
        id=row.id,
        name=row.name,
        protocol=cast(Any, row.protocol),
        phase=cast(Any, row.phase),
        world_size=spec["world_size"],
        ranks_per_node=tuple(spec["ranks_per_node"]),
        space=SPACE.validate_json(json.dumps(spec["knobs"])),
        baseline=Configuration(spec["default_configuration"]),
        fingerprint=spec["fingerprint"],
        limits=Limits.model_validate(spec["limits"]),
        software=spec["software"],
        created_at=row.created_at,
        last_contact_at=row.last_contact_at,
        ended_at=row.ended_at,
        finished_at=row.finished_at,
        result=result_record(row.result) if row.result else None,
        data=dict(row.data),
        round=row.round,
        inherited=Inherited.model_validate(row.inherited) if row.inherited else None,
        revision=row.revision,
    )


def result_record(column: dict[str, Any]) -> Result:
    return Result(**{**column, "configuration": Configuration(column["configuration"])})


def result_column(result: Result) -> dict[str, Any]:
    return {**asdict(result), "configuration": dict(result.configuration)}


def trial_record(row: TrialRow) -> Trial:
    measured = None
    if row.cost is not None:
        error = math.inf if row.standard_error is None else row.standard_error
        measured = Estimate(row.cost, error, row.steps, row.outliers)
    return Trial(
        index=row.index,
        purpose=cast(Any, row.purpose),
        configuration=Configuration(row.configuration),
        state=cast(Any, row.state),
        estimate=measured,
        failure=row.failure,
        started_at=row.started_at,
        ended_at=row.ended_at,
        round=row.round,
    )


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


def event_record(row: EventRow) -> Event:
    return Event(cast(Any, row.kind), row.trial, row.step, row.message, row.seconds, row.at)

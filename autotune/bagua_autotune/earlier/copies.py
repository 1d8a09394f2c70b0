"""What is known of a training in a few kilobytes, which its ranks hand from host to host.

The service beside rank 0 is lost with its host. So every node of the training keeps a copy, which
the next rank 0 gives to its own service: the jobs in it are there what earlier jobs of the same
name always are. A copy comes from a file and is checked like whatever comes from outside.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, model_validator

from bagua_autotune.costs import Cost, Kind
from bagua_autotune.earlier.heritage import MOST_ALIKE, model_key, network_key
from bagua_autotune.earlier.knowledge import Knowledge
from bagua_autotune.measuring.against_default import LARGEST_SPEED
from bagua_autotune.model.job import (
    MOST_TENSORS,
    Earlier,
    Event,
    Inherited,
    Job,
    JobSpec,
    Purpose,
    Result,
    Trial,
    TrialState,
)
from bagua_autotune.model.knobs import Given
from bagua_autotune.model.received import Memory, ReceivedTensor
from bagua_autotune.model.text import JOB_ID, without_nul
from bagua_autotune.store import Store
from bagua_autotune.store.lives import Place
from bagua_autotune.store.rows import as_column, estimate_columns, estimate_record, result_column
from bagua_wire.configuration import Configuration
from bagua_wire.messages import BEING_TUNED, JobPhase

# Of one training: as many kinds of topologies as it is likely to come back to.
MOST_JOBS = 8
MOST_TRIALS = 2000
ADOPTED = "the ranks had kept a copy of this job and brought it to this service"

JobId = Annotated[str, Field(pattern=f"^{JOB_ID.pattern}$")]
Seconds = Annotated[float, Field(ge=0, le=1e12)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Numbers = Annotated[tuple[float, ...], Field(max_length=8, fail_fast=True)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class CopiedTrial(_Part):
    """``cost`` with its error, in the unit of the job's objective; None: it was not measured."""

    purpose: Purpose
    configuration: dict[str, Given]
    state: TrialState
    cost: Annotated[float, Field(ge=-LARGEST_SPEED, le=LARGEST_SPEED)] | None = None
    standard_error: Annotated[float, Field(ge=0, le=LARGEST_SPEED)] | None = None
    steps: Count = 0
    outliers: Count = 0
    failure: Annotated[str, Field(max_length=4000), AfterValidator(without_nul)] | None = None
    round: Annotated[int, Field(ge=0, le=1000)] = 0
    memory: Memory | None = None

    @model_validator(mode="after")
    def _consistent(self) -> CopiedTrial:
        if (self.state == "measured") != (self.cost is not None):
            raise ValueError("a trial has a cost if it was measured, and only then")
        if self.state == "measured" and not self.steps:
            raise ValueError("a trial that was measured has steps")
        return self


class CopiedJob(_Part):
    """A job without its steps; ``spec`` is its registration without the tensors.

    ``ready_seconds`` and ``costs`` are those of Inherited, as this job found them or took them
    over; ``previous``, ``first`` and ``number`` say which life of the training it is.
    """

    id: JobId
    spec: dict[str, Any]
    phase: JobPhase
    created_at: Seconds
    last_contact_at: Seconds
    ended_at: Seconds | None
    finished_at: Seconds | None
    round: Annotated[int, Field(ge=0, le=1000)]
    result: Annotated[Result, PlainSerializer(result_column)] | None
    ready_seconds: (
        Annotated[tuple[Seconds, ...], Field(max_length=MOST_TENSORS, fail_fast=True)] | None
    )
    costs: Annotated[dict[str, Numbers], Field(max_length=1000)]
    earlier: Earlier | None
    previous: JobId | None
    first: JobId
    number: Annotated[int, Field(ge=1, le=2**31)]
    trials: Annotated[tuple[CopiedTrial, ...], Field(max_length=MOST_TRIALS, fail_fast=True)]

    @model_validator(mode="after")
    def _consistent(self) -> CopiedJob:
        rounds = [*(trial.round for trial in self.trials), self.round]
        if rounds != sorted(rounds):
            raise ValueError("the rounds of trials must ascend, up to the job's own")
        return self


class Copy(_Part):
    """Jobs of one name that train the same model, whose tensors they share; newest first."""

    format: Literal[1] = 1
    tensors: Annotated[
        tuple[ReceivedTensor, ...], Field(min_length=1, max_length=MOST_TENSORS, fail_fast=True)
    ]
    jobs: Annotated[
        tuple[CopiedJob, ...], Field(min_length=1, max_length=MOST_JOBS, fail_fast=True)
    ]

    @model_validator(mode="after")
    def _can_be_adopted(self) -> Copy:
        for spec, job in zip(self.specs(), self.jobs, strict=True):
            _check(spec, job)
        return self

    def specs(self) -> list[JobSpec]:
        """The registration of each job."""
        return [JobSpec.model_validate({**job.spec, "tensors": self.tensors}) for job in self.jobs]


def copy_of(store: Store, knowledge: Knowledge, job_id: str) -> Copy:
    """What is known of the job and of those that it could go on with; or raises UnknownJob."""
    job, spec = store.jobs.get(job_id), store.jobs.spec(job_id)
    chosen = {(job.fingerprint, job.phase == "finished"): job}
    for other in store.jobs.alike(job.name, model_key(spec), MOST_ALIKE):
        has_learned = other.result or any(trial.estimate for trial in store.trials.of(other.id))
        if has_learned and other.id != job_id and len(chosen) < MOST_JOBS:
            chosen.setdefault((other.fingerprint, other.phase == "finished"), other)
    jobs = tuple(_copied(store, knowledge, each, len(spec.tensors)) for each in chosen.values())
    return Copy(tensors=spec.tensors, jobs=jobs)


def adopt(store: Store, copy: Copy, now: float) -> int:
    """Take in those of its jobs that the store does not know; how many.

    Their training is over: whoever brings a copy begins another life.
    """
    # The clock of the host that made the copy may be ahead.
    ahead = max(0.0, max(job.last_contact_at for job in copy.jobs) - now)
    adopted = 0
    for spec, copied in reversed(list(zip(copy.specs(), copy.jobs, strict=True))):
        is_new = store.jobs.adopt(
            spec,
            [_trial(index, trial) for index, trial in enumerate(copied.trials)],
            Event("note", message=ADOPTED, at=now),
            model_key=model_key(spec),
            network_key=network_key(spec),
            **_columns(copied, ahead),
        )
        if is_new and copied.previous is not None:
            store.lives.enter(copied.id, Place(copied.previous, copied.first, copied.number))
        adopted += is_new
    return adopted


def _copied(store: Store, knowledge: Knowledge, job: Job, tensors: int) -> CopiedJob:
    ready, costs = knowledge.learned(job)
    place = store.lives.place_of(job.id)
    # What it began with, and that it began afresh, is over; the other service has other teams.
    spec = store.jobs.spec(job.id).model_copy(update={"begin_with": None, "fresh": False})
    return CopiedJob(
        id=job.id,
        spec=spec.model_dump(mode="json", exclude={"tensors", "team"}),
        phase=job.phase,
        created_at=job.created_at,
        last_contact_at=job.last_contact_at,
        ended_at=job.ended_at,
        finished_at=job.finished_at,
        round=job.round,
        result=job.result,
        ready_seconds=tuple(ready) if ready and len(ready) == tensors else None,
        costs={
            kind.key: (cost.latency_seconds, cost.seconds_per_byte, cost.chain_seconds_per_byte)
            for kind, cost in costs.items()
        },
        earlier=job.inherited.earlier if job.inherited else None,
        previous=place.previous,
        first=place.first,
        number=place.number,
        trials=tuple(map(_copied_trial, store.trials.of(job.id)[-MOST_TRIALS:])),
    )


def _copied_trial(trial: Trial) -> CopiedTrial:
    return CopiedTrial(
        purpose=trial.purpose,
        configuration=dict(trial.configuration),
        state=trial.state,
        failure=trial.failure,
        round=trial.round,
        memory=trial.memory,
        **estimate_columns(trial.estimate),
    )


def _check(spec: JobSpec, job: CopiedJob) -> None:
    """Raise ValueError unless all of it could be the job's."""
    for trial in job.trials:
        spec.check(trial.configuration)
    if job.result:
        spec.check(job.result.configuration)
    if job.ready_seconds is not None and len(job.ready_seconds) != len(spec.tensors):
        raise ValueError(f"ready_seconds: {len(job.ready_seconds)} for {len(spec.tensors)} tensors")
    for kind, cost in job.costs.items():
        try:
            Kind.parse(kind)
            Cost(*cost)
        except (TypeError, ValueError) as error:
            raise ValueError("costs: of no kind that a job can inherit") from error
        if min(cost) < 0:
            raise ValueError("costs: one is below 0")
    if (job.phase == "finished") != (job.result is not None and job.finished_at is not None):
        raise ValueError("phase: a job is finished if it has a result, and only then")


def _columns(copied: CopiedJob, ahead_seconds: float) -> dict[str, Any]:
    """Of a job that is taken in, besides those of its registration."""

    def at(moment: float | None) -> float | None:
        return None if moment is None else max(0.0, moment - ahead_seconds)

    last = max(0.0, copied.last_contact_at - ahead_seconds)
    inherited = Inherited(
        gain=None,
        ready_seconds=copied.ready_seconds,
        costs=copied.costs,
        source=copied.id,
        earlier=copied.earlier,
    )
    return {
        "id": copied.id,
        "phase": "lost" if copied.phase in BEING_TUNED else copied.phase,
        "round": copied.round,
        "created_at": at(copied.created_at),
        "last_contact_at": last,
        # Nobody told its end, or else it is in the copy.
        "ended_at": at(copied.ended_at) or math.nextafter(last, math.inf),
        "finished_at": at(copied.finished_at),
        "result": result_column(copied.result) if copied.result else None,
        "inherited": as_column(inherited),
    }


def _trial(index: int, copied: CopiedTrial) -> Trial:
    found = estimate_record(copied.cost, copied.standard_error, copied.steps, copied.outliers)
    configuration = Configuration(copied.configuration)
    return Trial(
        index, copied.purpose, configuration, copied.state, found, copied.failure,
        round=copied.round, memory=copied.memory,
    )  # fmt: skip

"""The requests of ``/api/v2``, checked strictly: nothing wrong is stored."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from bagua_autotune.earlier.copies import MOST_JOBS
from bagua_autotune.model.job import (
    MOST_KNOBS,
    MOST_RANKS,
    MOST_SOFTWARE,
    MOST_TENSORS,
    JobSpec,
    count_combinations,
)
from bagua_autotune.model.knobs import MANY_TENSORS, SPACE
from bagua_autotune.model.received import Memory
from bagua_autotune.model.text import without_nul
from bagua_autotune.model.view import View
from bagua_wire.knobs import EDGE_KNOBS
from bagua_wire.messages import ToldKind

Registration = JobSpec
Index = Annotated[int, Field(ge=0, lt=2**31)]
StepNumber = Annotated[int, Field(ge=0, le=2**53)]
# No step is so short or long; within these bounds every product and exponential is finite.
StepSeconds = Annotated[float, Field(ge=1e-9, le=1e9)]
# Combinations times tensors: room for all that our client offers, with the most tensors.
MOST_PLACES = 150_000_000
# The two times may come from two clocks.
LONGEST_COMPUTE_RATIO = 1.01
# Room for any unit; sums and products of these are finite.
Complexity = Annotated[float, Field(ge=0, le=1e18)]
ComputeSeconds = Annotated[float, Field(ge=0, le=1e9)]


class _Input(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Outline(BaseModel):
    """The size of a registration, checked before its tensors are checked one by one."""

    tensors: list[Any] = Field(max_length=MOST_TENSORS)
    knobs: dict[str, Any] = Field(max_length=MOST_KNOBS)
    default_configuration: dict[str, Any] = Field(max_length=MOST_KNOBS)
    software: dict[str, Any] = Field(default={}, max_length=MOST_SOFTWARE)

    @model_validator(mode="after")
    def _can_be_cut(self) -> Outline:
        try:
            space = SPACE.validate_python(self.knobs, strict=False)
        except ValidationError:
            return self  # the check of the whole registration says why
        fixed = EDGE_KNOBS if len(self.tensors) > MANY_TENSORS else ()
        combinations = count_combinations(space, self.default_configuration, fixed)
        if combinations * len(self.tensors) > MOST_PLACES:
            raise ValueError(
                f"{combinations} combinations of knobs for {len(self.tensors)} tensors are more "
                f"than this service can search: at most {MOST_PLACES // len(self.tensors)}; "
                "give some knobs fewer values"
            )
        return self


class CopyOutline(BaseModel):
    """The size of a copy, checked first likewise."""

    tensors: list[Any] = Field(max_length=MOST_TENSORS)
    jobs: list[Any] = Field(max_length=MOST_JOBS)


class Adopted(View):
    """How many jobs of a copy were new to the service."""

    jobs: int


class StepTimes(_Input):
    """One step: how many seconds it took each rank, by rank.

    ``compute_seconds``: the seconds from the end of the previous step's communication until the
    rank's last gradient was ready. Steps of synchronous ranks all end together, so only these show
    which rank is slow.

    ``complexity``: how much was in the largest batch of a rank, in a unit of the training's own
    (tokens, say). Where steps take longer because of it, trials are compared without that.
    """

    step: StepNumber
    seconds: tuple[StepSeconds, ...] = Field(
        min_length=1, max_length=MOST_RANKS, fail_fast=True, strict=False
    )
    compute_seconds: (
        Annotated[
            tuple[ComputeSeconds, ...], Field(max_length=MOST_RANKS, fail_fast=True, strict=False)
        ]
        | None
    ) = None
    complexity: Complexity | None = None

    @model_validator(mode="after")
    def _of_the_same_ranks(self) -> StepTimes:
        if self.compute_seconds is not None and len(self.compute_seconds) != len(self.seconds):
            raise ValueError(
                f"compute_seconds has {len(self.compute_seconds)} values, "
                f"seconds has {len(self.seconds)}"
            )
        for rank, (own, step) in enumerate(
            zip(self.compute_seconds or (), self.seconds, strict=False)
        ):
            if own > step * LONGEST_COMPUTE_RATIO:
                raise ValueError(
                    f"compute_seconds: rank {rank} computed for {own:.6g} s in a step of "
                    f"{step:.6g} s; it cannot be longer than the step"
                )
        return self


class Observations(_Input):
    """Steps measured under a trial; an empty list asks for the state. Safe to send twice.

    ``memory``: what the trial took so far; of all that is told of a trial the fullest counts.
    """

    trial: Index
    steps: tuple[StepTimes, ...] = Field(max_length=10_000, fail_fast=True, strict=False)
    memory: Memory | None = None

    @model_validator(mode="after")
    def _increasing(self) -> Observations:
        numbers = [step.step for step in self.steps]
        for earlier, later in pairwise(numbers):
            if later <= earlier:
                raise ValueError(f"steps: {later} follows {earlier}; they must increase")
        return self


class ProgressReport(_Input):
    """How far a tuned job is: its last step, and what a step takes, in seconds of the slowest rank.
    Counted once, however often it is sent."""

    step: StepNumber
    seconds: StepSeconds


class Prune(_Input):
    """Which jobs to delete: those that have not reported for so many days."""

    older_than_days: int = Field(ge=1, le=36_500)
    dry_run: bool = Field(default=False, description="List the jobs and delete none.")


class NewEvent(_Input):
    """Something that happened to a job. ``memory``: what did not fit, of an infeasible trial."""

    kind: ToldKind
    trial: Index | None = None
    step: StepNumber | None = None
    message: Annotated[str, Field(max_length=2000), AfterValidator(without_nul)] = ""
    seconds: float | None = Field(default=None, ge=0, le=1e9)
    memory: Memory | None = None

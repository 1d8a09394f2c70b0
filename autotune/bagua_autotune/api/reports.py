"""What the ranks send to ``/api/v2``: strict, so that nothing wrong is stored."""

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

from bagua_autotune.model.job import (
    MOST_KNOBS,
    MOST_RANKS,
    MOST_SOFTWARE,
    MOST_TENSORS,
    JobSpec,
    ToldKind,
    count_combinations,
)
from bagua_autotune.model.knobs import EDGE_KNOBS, MANY_TENSORS, SPACE
from bagua_autotune.model.text import without_nul
from bagua_autotune.model.view import View
from bagua_autotune.tuning.copies import MOST_JOBS

Registration = JobSpec
Index = Annotated[int, Field(ge=0, lt=2**31)]
StepNumber = Annotated[int, Field(ge=0, le=2**53)]
# The bounds keep every product and exponential finite; no step is that short or long.
StepSeconds = Annotated[float, Field(ge=1e-9, le=1e9)]
# Combinations times tensors: all that this project's client offers, for the most tensors.
MOST_PLACES = 150_000_000
# Two clocks may have told them.
LONGEST_COMPUTE_RATIO = 1.01
ComputeSeconds = Annotated[float, Field(ge=0, le=1e9)]


class _Input(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Outline(BaseModel):
    """How large a registration is: refused before its tensors are checked one by one."""

    tensors: list[Any] = Field(max_length=MOST_TENSORS)
    knobs: dict[str, Any] = Field(max_length=MOST_KNOBS)
    default_configuration: dict[str, Any] = Field(max_length=MOST_KNOBS)
    software: dict[str, Any] = Field(default={}, max_length=MOST_SOFTWARE)

    @model_validator(mode="after")
    def _can_be_cut(self) -> Outline:
        try:
            space = SPACE.validate_python(self.knobs, strict=False)
        except ValidationError:
            return self  # the registration itself says why
        fixed = EDGE_KNOBS if len(self.tensors) > MANY_TENSORS else ()
        combinations = count_combinations(space, self.default_configuration, fixed)
        if combinations * len(self.tensors) > MOST_PLACES:
            raise ValueError(
                f"{combinations} combinations of knobs for {len(self.tensors)} tensors are more "
                f"than this service looks through; {MOST_PLACES // len(self.tensors)} can be: "
                "leave out values that need no trial"
            )
        return self


class CopyOutline(BaseModel):
    """How large a copy is: the same."""

    tensors: list[Any] = Field(max_length=MOST_TENSORS)
    jobs: list[Any] = Field(max_length=MOST_JOBS)


class Adopted(View):
    """How many jobs of a copy were not known."""

    jobs: int


class StepTimes(_Input):
    """One step: the seconds that each rank took, by rank.

    ``compute_seconds``: those from the end of the communication of the step before until the
    rank's last gradient was ready. Steps of synchronous ranks all end together; these tell who
    is slow.
    """

    step: StepNumber
    seconds: tuple[StepSeconds, ...] = Field(min_length=1, max_length=MOST_RANKS, fail_fast=True)
    compute_seconds: (
        Annotated[tuple[ComputeSeconds, ...], Field(max_length=MOST_RANKS, fail_fast=True)] | None
    ) = None

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
                    f"{step:.6g} s; computing is a part of the step"
                )
        return self


class Observations(_Input):
    """Steps run under a trial; none of them is a poll. Safe to send twice."""

    trial: Index
    steps: tuple[StepTimes, ...] = Field(max_length=10_000, fail_fast=True)

    @model_validator(mode="after")
    def _increasing(self) -> Observations:
        numbers = [step.step for step in self.steps]
        for earlier, later in pairwise(numbers):
            if later <= earlier:
                raise ValueError(f"steps: {later} follows {earlier}; they must increase")
        return self


class Progress(_Input):
    """How far a tuned job is: its last step, and what a step takes, in seconds of the slowest rank.
    Counted once, however often it is sent."""

    step: StepNumber
    seconds: StepSeconds


class Prune(_Input):
    """Which jobs to delete: those not heard of for so many days."""

    older_than_days: int = Field(ge=1, le=36_500)
    dry_run: bool = Field(default=False, description="List the jobs and delete none.")


class NewEvent(_Input):
    """Something that happened to a job."""

    kind: ToldKind
    trial: Index | None = None
    step: StepNumber | None = None
    message: Annotated[str, Field(max_length=2000), AfterValidator(without_nul)] = ""
    seconds: float | None = Field(default=None, ge=0, le=1e9)

"""Jobs, trials, observations and events: the records that the whole service speaks of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from bagua_autotune.model.knobs import (
    Categorical,
    ConfigurationField,
    Given,
    Knob,
    LogInteger,
    Partition,
    Space,
    check_configuration,
    choices,
)
from bagua_autotune.model.received import Memory, ReceivedTensor
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.model.text import printable, visible
from bagua_autotune.model.view import Moment
from bagua_wire import limits
from bagua_wire.configuration import Configuration, Value
from bagua_wire.knobs import ALGORITHM_KNOB, BUCKET_KNOB, PARTITION_KNOB
from bagua_wire.messages import JobPhase, ToldKind

# By which a job's ranks speak: Bagua's own, or this project's. Of a search with whole runs (system)
# there are none: its runs are timed by their steps, or have a score of their own.
Api = Literal["v1", "v2", "runs", "scores"]
RUNS: tuple[Api, ...] = ("runs", "scores")
# The training ended, or is lost, before its tuning did.
CUT_SHORT: tuple[JobPhase, ...] = ("ended", "lost")
OVER: tuple[JobPhase, ...] = ("finished", *CUT_SHORT)
Purpose = Literal["search", "confirm"]
TrialState = Literal["proposed", "running", "measured", "failed", "infeasible"]
# Nothing was measured, and the ranks do not run it.
GIVEN_UP: tuple[TrialState, ...] = ("failed", "infeasible")
EventKind = Literal[ToldKind, "lost"]
# So long after its last word a job is lost where nothing is promised, as by Bagua's workers, or
# where nobody listened all the while.
SILENT_SECONDS = 3600.0
# While its ranks say nothing new their contact is written so often: the page warns of a minute's
# silence.
CONTACT_SECONDS = 30.0


# Every candidate is looked at in every decision.
MOST_COMBINATIONS = 10_000
MOST_TENSORS = 100_000
MOST_KNOBS = 16
MOST_SOFTWARE = 64
# The largest trainings have some ten thousand; an observation holds a place for each.
MOST_RANKS = 2**17

LONGEST_NAME = 200
ShortText = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME), AfterValidator(printable)]
JobName = Annotated[ShortText, AfterValidator(visible)]
Fingerprint = Annotated[str, Field(min_length=1, max_length=128), AfterValidator(printable)]
TeamName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
KnobName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]


class Limits(BaseModel):
    """Bounds on the cost of tuning.

    ``remaining_steps`` are those that the training is expected to run on: what a faster step is
    worth. ``max_rounds`` counts the first tuning and those after lasting changes. A
    round ends after ``max_seconds``, its confirmation too; None: after ten minutes, or the time of
    20 trials where that is longer.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    max_samples: int = Field(default=limits.SAMPLES, ge=1, le=limits.MOST_SAMPLES)
    trial_seconds: float = Field(default=limits.TRIAL_SECONDS, gt=0, le=86_400)
    warmup_seconds: float = Field(default=limits.WARMUP_SECONDS, ge=0, le=86_400)
    remaining_steps: int = Field(default=limits.REMAINING_STEPS, ge=1, le=limits.MOST_STEPS)
    max_rounds: int = Field(default=limits.ROUNDS, ge=1, le=limits.MOST_ROUNDS)
    max_seconds: float | None = Field(default=None, gt=0, le=10**9)


class JobSpec(BaseModel):
    """What a job is registered with; it never changes afterwards.

    ``begin_with``: what is tried first, after the default. ``run``: what its launcher calls the
    run, the same in all of its lives; None: it has no name. ``fresh``: it takes over nothing from
    earlier jobs. ``team``: whose job it is, which its registration does not say but its token;
    None: nobody's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: JobName
    world_size: int = Field(ge=1, le=MOST_RANKS)
    ranks_per_node: tuple[Annotated[int, Field(ge=1, le=MOST_RANKS)], ...] = Field(
        max_length=MOST_RANKS, fail_fast=True, strict=False
    )
    tensors: tuple[ReceivedTensor, ...] = Field(
        min_length=1, max_length=MOST_TENSORS, fail_fast=True, strict=False
    )
    knobs: dict[KnobName, Knob] = Field(min_length=1, max_length=MOST_KNOBS)
    default_configuration: dict[KnobName, Given] = Field(max_length=MOST_KNOBS)
    fingerprint: Fingerprint
    limits: Limits = Limits()
    software: dict[ShortText, ShortText] = Field(default={}, max_length=MOST_SOFTWARE)
    begin_with: dict[KnobName, Given] | None = Field(default=None, max_length=MOST_KNOBS)
    run: ShortText | None = None
    fresh: bool = False
    team: SkipJsonSchema[TeamName | None] = None

    @model_validator(mode="after")
    def _consistent(self) -> JobSpec:
        if sum(self.ranks_per_node) != self.world_size:
            raise ValueError(
                f"ranks_per_node sums to {sum(self.ranks_per_node)}, "
                f"world_size is {self.world_size}"
            )
        if len({tensor.name for tensor in self.tensors}) != len(self.tensors):
            raise ValueError("tensors: a name occurs twice")
        sizes = self.knobs.get(BUCKET_KNOB)
        if not isinstance(sizes, LogInteger) and (sizes is not None or self.world_size > 1):
            raise ValueError(
                f"knobs: {BUCKET_KNOB} is needed where there are several ranks, and must be a "
                "log_integer"
            )
        self._check_reserved_knobs()
        combinations = count_combinations(self.knobs, self.default_configuration)
        if combinations > MOST_COMBINATIONS:
            raise ValueError(
                f"knobs: {combinations} combinations, more than {MOST_COMBINATIONS}; "
                "leave out values that need no trial"
            )
        for field_name in ("default_configuration", "begin_with"):
            try:
                if (given := getattr(self, field_name)) is not None:
                    self.check(given)
            except ValueError as error:
                raise ValueError(f"{field_name}: {error}") from error
        return self

    def check(self, configuration: Mapping[str, Value]) -> None:
        """Raise ValueError, naming the knob, unless the job can run the configuration."""
        check_configuration(configuration, self.knobs)
        for knob, counts in configuration.items():
            held = sum(counts) if isinstance(counts, tuple) else 0
            if held not in (0, len(self.tensors)):
                raise ValueError(f"{knob} holds {held} tensors, the job has {len(self.tensors)}")

    def _check_reserved_knobs(self) -> None:
        """Check that knobs whose names the cost model knows have the kinds that it expects."""
        for knob, least in (("channels", 1), ("first_bucket_bytes", 0), ("last_bucket_bytes", 0)):
            domain = self.knobs.get(knob)
            values = domain.values if isinstance(domain, Categorical) else ()
            if domain and not (values and all(isinstance(v, int) and v >= least for v in values)):
                raise ValueError(f"knobs: {knob} must be a categorical of numbers from {least} on")
        for knob in ("hierarchical", "wire_precision", ALGORITHM_KNOB):
            if not isinstance(self.knobs.get(knob), (Categorical, type(None))):
                raise ValueError(f"knobs: {knob} must be a categorical")
        for knob, domain in self.knobs.items():
            if isinstance(domain, Partition) != (knob == PARTITION_KNOB):
                raise ValueError(
                    f"knobs: {knob}: a knob is named buckets if it is a partition, and only then"
                )


def count_combinations(
    space: Space, baseline: Mapping[str, Value], fixed: Sequence[str] = ()
) -> int:
    """Count the configurations that there may be at most, with ``fixed`` knobs at the default's
    values.
    """
    return sum(
        math.prod(d.choices for knob, d in space.items() if knob not in stays and knob not in fixed)
        for stays in choices(space, baseline)
    )


@dataclass(frozen=True)
class Result:
    """What a job was left with. Speed-ups are over the default, with a 95 % interval.

    ``cost_steps`` is what the search cost, in steps of the default's length; ``payback_steps``
    is after how many steps at the winner it is earned (None where the default was kept), and
    ``reason`` why that was. ``reason_code`` says for programs why the job was left with what it
    has. Neither goes over the wire.

    ``default_peak_bytes`` and ``peak_bytes``: the memory that the default and the configuration
    take at their peak on the fullest rank, of its ``device_bytes``; None where it is not known.
    """

    configuration: ConfigurationField
    kept: Literal["winner", "baseline"]
    speedup: float
    low: float
    high: float
    trials: int
    steps: int
    seconds: float
    summary: str
    cost_steps: float = 0.0
    cost_seconds: float = 0.0
    payback_steps: int | None = None
    reason: Annotated[str, Field(exclude=True)] = ""
    reason_code: Annotated[str, Field(exclude=True)] = ""
    default_peak_bytes: int | None = None
    peak_bytes: int | None = None
    device_bytes: int | None = None


class EarlierTrial(BaseModel):
    """A trial of a tuning that was cut short; ``cost`` is over its default's. One with a
    ``failure`` and a ``memory`` was infeasible."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    configuration: dict[str, Given]
    cost: float = 0.0
    standard_error: float | None = None
    count: int = 0
    outliers: int = 0
    failure: str | None = None
    memory: Memory | None = None


class Earlier(BaseModel):
    """What a tuning that was cut short leaves to the same job when it is started again.

    Attributes:
        baseline: what its default cost; None if it ran on other ranks, so that costs do not hold.
        trials: its search trials, without the default.
        under_way: the configuration that ran when it was cut short; those of its earlier lives
            before that.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    baseline: float | None = None
    trials: tuple[EarlierTrial, ...] = Field(default=(), fail_fast=True)
    under_way: tuple[dict[str, Given], ...] = Field(default=(), fail_fast=True)


class Inherited(BaseModel):
    """What a new job knows from earlier ones in the store.

    Attributes:
        configuration: the stored best of a job with the same fingerprint; None if only parts
            are known.
        gain: its gain over the default in cost, as it was confirmed; 0 if the default was best,
            None if nothing was confirmed for this job.
        ready_seconds: of the same model's tensors; None if unknown.
        costs: of the same network's collectives, by kind: latency seconds, seconds per byte, and
            those of the rest of a chain.
        source: the job that it comes from; empty: the training itself said it (``begin_with``).
        earlier: of the same job, if its tuning was cut short.
        refused: of what did not fit in memory when ``configuration`` was found, what needed the
            least.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    configuration: dict[str, Value] | None = None
    gain: float | None = 0.0
    ready_seconds: tuple[float, ...] | None = None
    costs: dict[str, tuple[float, ...]] = {}
    source: str
    earlier: Earlier | None = None
    refused: Memory | None = None


@dataclass(frozen=True)
class Saved:
    """What a job's confirmed speed-ups have saved so far, over all rounds.

    Attributes:
        step: the last step that is counted.
        seconds: by which the default would have taken longer for the counted steps.
    """

    step: int = -1
    seconds: float = 0.0


@dataclass(frozen=True)
class Job:
    """A registered job without its tensors, which are many and rarely needed.

    ``data`` is the protocol's own state.  ``round`` counts the tunings: 0 is the first, another
    one follows each lasting change.  ``revision`` is raised by whatever is written of the job.
    ``absences``: from when until when its training was away.
    Times are seconds since the epoch.
    """

    id: str
    name: str
    protocol: Api
    phase: JobPhase
    world_size: int
    ranks_per_node: tuple[int, ...]
    space: Space
    baseline: Configuration
    fingerprint: str
    limits: Limits
    software: dict[str, str]
    created_at: float
    last_contact_at: float
    ended_at: float | None = None
    finished_at: float | None = None
    result: Result | None = None
    data: dict[str, Any] = field(default_factory=dict)
    round: int = 0
    inherited: Inherited | None = None
    revision: int = 0
    absences: tuple[tuple[float, float], ...] = ()
    run: str | None = None
    saved: Saved = Saved()
    fresh: bool = False
    team: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more is tried: it is tuned, or its training ended before."""
        return self.phase in OVER

    @property
    def is_lost(self) -> bool:
        """Whether it was ended since nothing was heard of it, not by its ranks' own word."""
        return self.ended_at is not None and self.ended_at > self.last_contact_at

    def present_seconds(self, begin: float, end: float) -> float:
        """The time between two moments in which its training was there."""
        away = (min(end, until) - max(begin, since) for since, until in self.absences)
        return max(0.0, end - begin - sum(seconds for seconds in away if seconds > 0))


@dataclass(frozen=True)
class Trial:
    """A configuration tried on the live job; ``estimate`` once it is measured.

    ``failure``: why it was given up. ``memory``: that it took, or would have taken.
    """

    index: int
    purpose: Purpose
    configuration: Configuration
    state: TrialState = "proposed"
    estimate: Estimate | None = None
    failure: str | None = None
    started_at: float | None = None
    ended_at: float | None = None
    round: int = 0
    memory: Memory | None = None

    @property
    def is_open(self) -> bool:
        return self.state in ("proposed", "running")

    @property
    def is_given_up(self) -> bool:
        return self.state in GIVEN_UP

    @property
    def was_tried(self) -> bool:
        """Whether it was, or will be: what does not fit as predicted costs nothing, and counts as
        no sample."""
        return self.state != "infeasible" or not (self.memory and self.memory.is_predicted)


@dataclass(frozen=True)
class Observation:
    """What the ranks reported of one step: one value per rank, None where it is missing.

    ``compute``: the seconds that each rank computed, from the end of the communication of the
    step before until its last gradient was ready; None where the ranks do not tell.
    ``complexity``: how much was in the largest batch of a rank, in the training's own unit; None
    where some rank does not tell.
    """

    step: int
    values: tuple[float | None, ...]
    compute: tuple[float | None, ...] | None = None
    complexity: float | None = None


@dataclass(frozen=True)
class Event:
    """Something that happened to a job, told by its ranks."""

    kind: EventKind
    trial: int | None = None
    step: int | None = None
    message: str = ""
    seconds: float | None = None
    at: Moment = 0.0


MOST_SETTINGS = 1000
# Such as ds_config.json:zero_optimization.reduce_bucket_size, with the path of the file.
LONGEST_SETTING = 4096
SettingName = Annotated[
    str, Field(min_length=1, max_length=LONGEST_SETTING), AfterValidator(printable)
]


class RunsSpec(JobSpec):
    """A search with whole runs (``bagua-autotune system``): a job without tensors, whose knobs are
    settings of a command, by the names that the command line has for them. Nothing of it comes from
    a request."""

    tensors: tuple[ReceivedTensor, ...] = ()
    knobs: dict[SettingName, Knob] = Field(min_length=1, max_length=MOST_SETTINGS)
    default_configuration: dict[SettingName, Given] = Field(max_length=MOST_SETTINGS)

    @model_validator(mode="after")
    def _consistent(self) -> RunsSpec:
        for name, domain in self.knobs.items():
            if not isinstance(domain, Categorical):
                raise ValueError(f"knobs: {name} must be a categorical")
        check_configuration(self.default_configuration, self.knobs)
        return self

"""The file that ``bagua-autotune export JOB --profile`` writes: a measured job, summed up. What was
measured beside its computing are the buckets of its profiled steps, and how long all of its steps
took, by configuration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Literal, TypeVar, cast, get_args

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from bagua_simulator.cluster import Cluster, Way
from bagua_simulator.measured.computing import ProfiledStep, fit_computing, scatter
from bagua_simulator.simulator import CONTENTION, DEFAULT, LAUNCH_SECONDS, Simulator
from bagua_simulator.workload import Workload
from bagua_wire.configuration import Configuration, Value
from bagua_wire.cutting import Tensor
from bagua_wire.knobs import (
    ALGORITHM_KNOB,
    BUCKET_KNOB,
    CHANNELS_KNOB,
    LOSSLESS_KNOBS,
    PRECISION_KNOB,
    USUAL_ALGORITHM,
    WAYS_KNOB,
)
from bagua_wire.profile import BucketTiming

# Of each step the first so many: thousands more add little and take long to fit.
MOST_BUCKETS = 100
T = TypeVar("T")


def checked(record: T) -> T:
    """One of the wire's records, read from a file. Raises ValueError unless all products of its
    numbers are finite and none is negative."""
    for name, value in vars(record).items():
        if not isinstance(value, str) and not 0 <= value <= 2**53:
            raise ValueError(f"{name} is {value}; it must be from 0 to 2^53")
    return record


class Traffic(BaseModel):
    """The buckets of steps with the same configuration, with unchanged gradients.

    Attributes:
        hierarchical: how they were reduced.
        channels: process groups that they used in turn.
        steps: how many there were.
        spread: standard deviation of the logarithm of their lengths, outliers apart.
        buckets: in the order in which they started, no more than ``MOST_BUCKETS``; medians of
            their times. A bucket that does not end after its start was not measured.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    hierarchical: Way = "off"
    channels: int = Field(default=1, ge=1, le=2**53)
    steps: int = Field(default=1, ge=1, le=2**53)
    spread: float = Field(default=0.0, ge=0, le=1e3)
    buckets: tuple[Annotated[BucketTiming, AfterValidator(checked)], ...] = Field(
        min_length=1, max_length=100_000
    )

    @property
    def is_measured(self) -> bool:
        """Whether the duration of a bucket with gradients was measured."""
        return any(b.bytes and b.ended_seconds > b.started_seconds for b in self.buckets)


def traffic_of(steps: Iterable[ProfiledStep]) -> tuple[Traffic, ...]:
    """The traffic of steps with a known way of reducing that sum up unchanged gradients."""
    alike: dict[tuple[Way, int, tuple[int, ...]], list[Sequence[BucketTiming]]] = {}
    for configuration, profile in steps:
        known = way_and_channels(configuration)
        buckets = sorted(profile.buckets, key=lambda bucket: bucket.started_seconds)[:MOST_BUCKETS]
        if known and any(bucket.ended_seconds > bucket.started_seconds for bucket in buckets):
            sizes = tuple(bucket.bytes for bucket in buckets)
            alike.setdefault((*known, sizes), []).append(buckets)
    return tuple(summed_up(found, way, channels) for (way, channels, _), found in alike.items())


def way_and_channels(configuration: Mapping[str, Value]) -> tuple[Way, int] | None:
    """How a configuration sums up unchanged gradients; None if it does not, or in another way."""
    way, channels = configuration.get(WAYS_KNOB, "off"), configuration.get(CHANNELS_KNOB, 1)
    as_is = configuration.get(PRECISION_KNOB, "as_is") == "as_is"
    is_sum = configuration.get(ALGORITHM_KNOB, USUAL_ALGORITHM) == USUAL_ALGORITHM
    if not as_is or not is_sum or way not in get_args(Way) or not isinstance(channels, int):
        return None
    return cast(Way, way), channels


def summed_up(
    steps: Sequence[Sequence[BucketTiming]], hierarchical: Way = "off", channels: int = 1
) -> Traffic:
    """Sum up steps with the same configuration as one entry."""
    starts = np.array([[bucket.started_seconds for bucket in step] for step in steps])
    ends = np.array([[bucket.ended_seconds for bucket in step] for step in steps])
    lengths = ends.max(axis=1) - starts.min(axis=1)
    times = zip(
        steps[0], np.median(starts, axis=0).tolist(), np.median(ends, axis=0).tolist(), strict=True
    )
    return Traffic(
        hierarchical=hierarchical,
        channels=channels,
        steps=len(steps),
        spread=scatter(np.log(lengths)),
        buckets=tuple(
            BucketTiming(bytes=bucket.bytes, started_seconds=start, ended_seconds=end)
            for bucket, start, end in times
        ),
    )


MOST_CONFIGURATIONS = 40
"""Of those with the most steps: each one more takes longer to fit and adds little."""
MeasuredStep = tuple[Mapping[str, Value], float]
"""A step's configuration, and its seconds on the slowest rank."""


class StepTimes(BaseModel):
    """The measured steps with one configuration, which sums up unchanged gradients.

    Attributes:
        steps: how many there were.
        seconds: their median.
        low_seconds, high_seconds: the shortest and the longest.
        spread: standard deviation of their logarithms, outliers apart.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    configuration: dict[str, Value]
    steps: int = Field(ge=1, le=2**53)
    seconds: float = Field(gt=0, le=1e9)
    low_seconds: float = Field(gt=0, le=1e9)
    high_seconds: float = Field(gt=0, le=1e9)
    spread: float = Field(ge=0, le=1e3)

    @property
    def uncertainty(self) -> float:
        """Standard error of the logarithm of ``seconds``, about."""
        return self.spread / math.sqrt(self.steps)


def step_times_of(steps: Iterable[MeasuredStep]) -> tuple[StepTimes, ...]:
    """By configuration; the steps of a sharded model, and those that send something else than
    gradients as they are, are left out: they are simulated in another way."""
    alike: dict[Configuration, list[float]] = {}
    for knobs, seconds in steps:
        if BUCKET_KNOB in knobs and way_and_channels(knobs) and seconds > 0:
            alike.setdefault(Configuration(knobs), []).append(seconds)
    found = sorted(alike.items(), key=lambda item: len(item[1]), reverse=True)
    return tuple(
        StepTimes(
            configuration=dict(configuration),
            steps=len(each),
            seconds=median(each),
            low_seconds=min(each),
            high_seconds=max(each),
            spread=scatter(np.log(each)),
        )
        for configuration, each in found[:MOST_CONFIGURATIONS]
    )


Seconds = Annotated[float, Field(ge=0, le=1e9)]


class RecordError(Exception):
    """A file that cannot be used; the text says which and why."""


class Record(BaseModel):
    """A job's computing times and its network traffic.

    Attributes:
        tensors: in gradient-ready order.
        forward_seconds: until the first gradient is ready.
        ready_seconds: of each tensor, since the first one, without communication.
        contention, launch_seconds: the effect of communication on computing; see
            :class:`~bagua_simulator.simulator.Simulator`.
        traffic: of profiled steps, grouped by configuration; empty if the job always sent
            another precision.
        step_times: of all measured steps, by configuration.
        default: the job's own default configuration; None: it is not known, or not simulated.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    format: Literal["bagua-autotune profile"] = "bagua-autotune profile"
    job: str = Field(min_length=1, max_length=200)
    ranks_per_node: tuple[Annotated[int, Field(ge=1, le=1_000_000)], ...] = Field(min_length=1)
    tensors: tuple[Annotated[Tensor, AfterValidator(checked)], ...] = Field(
        min_length=1, max_length=100_000
    )
    forward_seconds: Seconds
    ready_seconds: tuple[Seconds, ...]
    version: Literal[3] = 3
    contention: float = Field(default=CONTENTION, ge=0, le=1e3)
    launch_seconds: Seconds = LAUNCH_SECONDS
    traffic: tuple[Traffic, ...] = Field(default=(), max_length=1_000_000)
    step_times: tuple[StepTimes, ...] = Field(default=(), max_length=100_000)
    default: dict[str, Value] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Record:
        if len(self.ready_seconds) != len(self.tensors):
            raise ValueError(
                f"ready_seconds has {len(self.ready_seconds)} entries for "
                f"{len(self.tensors)} tensors"
            )
        if any(later < earlier for earlier, later in pairwise(self.ready_seconds)):
            raise ValueError("ready_seconds must ascend")
        return self

    @property
    def workload(self) -> Workload:
        return Workload(self.job, self.tensors, self.forward_seconds, self.ready_seconds)

    @property
    def shape(self) -> tuple[int, int]:
        """The number of nodes, and of ranks on the largest of them."""
        return len(self.ranks_per_node), max(self.ranks_per_node)

    @property
    def is_nccl(self) -> bool:
        """Whether NCCL summed up the gradients: they were on GPUs."""
        return any("/cuda" in tensor.group for tensor in self.tensors)

    def simulator(self, cluster: Cluster) -> Simulator:
        """The job on a cluster."""
        baseline = Configuration(DEFAULT, **self.default) if self.default else DEFAULT
        return Simulator(self.workload, cluster, self.contention, self.launch_seconds, baseline)


def load_record(path: Path) -> Record:
    """Read and check a file.

    Raises:
        RecordError: it cannot be read, or is not such a record.
    """
    try:
        return Record.model_validate_json(path.read_bytes())
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        what = f"{place}: {first['msg']}" if place else first["msg"]
        raise RecordError(
            f"{path} is not a file of 'bagua-autotune export JOB --profile': {what}"
        ) from error


def summarise(
    job: str,
    ranks_per_node: Sequence[int],
    tensors: Sequence[Tensor],
    steps: Sequence[ProfiledStep],
    measured: Iterable[MeasuredStep] = (),
    default: Mapping[str, Value] | None = None,
) -> Record:
    """The record of a job.

    Args:
        steps: each with its configuration.
        measured: steps that trials were judged by.
        default: the job's default configuration.

    Raises:
        ValueError: there is no step, or one does not fit the tensors.
    """
    if not steps:
        raise ValueError("no step of this job has been profiled")
    for _, profile in steps:
        if len(profile.ready_seconds) != len(tensors):
            raise ValueError(
                f"step {profile.step} was profiled with {len(profile.ready_seconds)} tensors; "
                f"the job has {len(tensors)}"
            )
    computing = fit_computing(steps)
    return Record(
        job=job,
        ranks_per_node=tuple(ranks_per_node),
        tensors=tuple(tensors),
        forward_seconds=computing.forward_seconds,
        ready_seconds=tuple(computing.ready_seconds.tolist()),
        contention=computing.contention,
        launch_seconds=computing.launch_seconds,
        traffic=traffic_of(steps),
        step_times=step_times_of(measured),
        default=_simulated(default or {}),
    )


def _simulated(configuration: Mapping[str, Value]) -> dict[str, Value] | None:
    """The knobs of it that are simulated; None if it does something else than they say, as that of
    a sharded model does."""
    is_sharded = any(knob in configuration for knob in LOSSLESS_KNOBS if knob not in DEFAULT)
    if is_sharded or BUCKET_KNOB not in configuration or not way_and_channels(configuration):
        return None
    return {knob: v for knob, v in configuration.items() if knob in DEFAULT}

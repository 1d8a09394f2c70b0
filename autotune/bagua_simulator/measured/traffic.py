"""What was measured of a job beside its computing: the buckets of its profiled steps, and how long
all of its steps took, by configuration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Annotated, TypeVar, cast, get_args

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from bagua_simulator.collectives import Way
from bagua_simulator.measured.computing import ProfiledStep
from bagua_simulator.measured.robust import scatter
from bagua_wire.configuration import Configuration, Value
from bagua_wire.knobs import (
    ALGORITHM_KNOB,
    BUCKET_KNOB,
    CHANNELS_KNOB,
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

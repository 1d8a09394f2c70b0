"""How long a job's steps took with each configuration that it tried, whether recorded or not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import median

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from bagua_simulator.measured.robust import scatter
from bagua_simulator.measured.traffic import way_and_channels
from bagua_wire.configuration import Configuration, Value
from bagua_wire.knobs import BUCKET_KNOB

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

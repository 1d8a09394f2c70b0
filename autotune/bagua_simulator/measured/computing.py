"""The computing times of a job's profiled steps, without the effect of communication; and robust
least squares: residuals that share a fault cannot dominate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bagua_simulator.cluster import parts
from bagua_simulator.simulator import CONTENTION, LAUNCH_SECONDS
from bagua_wire.configuration import Value
from bagua_wire.profile import Profile

Floats = NDArray[np.float64]
# Standard deviations of a normal distribution in its median absolute deviation.
DEVIATIONS = 1.4826


def bounded(residuals: Floats) -> Floats:
    """The residuals of one trial, scaled so that their sum of squares becomes log(1 + it).

    This is Cauchy's loss of all of them together: the further off a disturbed trial is, the less it
    pulls.
    """
    squares = float(residuals @ residuals)
    if squares < 1e-12:
        return residuals
    shortened: Floats = residuals * math.sqrt(math.log1p(squares) / squares)
    return shortened


def softened(residuals: Floats) -> Floats:
    """Each residual scaled so that its square grows only linearly above 1 (soft L1)."""
    found: Floats = np.sign(residuals) * np.sqrt(2 * (np.sqrt(1 + residuals**2) - 1))
    return found


def scatter(values: Floats) -> float:
    """Standard deviation without outliers, from the median absolute deviation."""
    return DEVIATIONS * float(np.median(np.abs(values - np.median(values))))


ProfiledStep = tuple[Mapping[str, Value], Profile]
"""A step's configuration, and rank 0's profile of it."""
# How much the computing time differs from trial to trial, as a share of it.
SPREAD = 0.02
# Trials are compared at the ends of so many parts of the backward pass.
PARTS = 8
# Least squares stops after so many evaluations of two parameters and their derivatives.
MOST_EVALUATIONS = 40


class Computing(NamedTuple):
    """``ready_seconds`` of each tensor since the first one, ascending, with an idle network."""

    forward_seconds: float
    ready_seconds: Floats
    contention: float
    launch_seconds: float


def fit_computing(steps: Sequence[ProfiledStep]) -> Computing:
    """Medians over the steps.

    Computing is slower while buckets are sent, and launching them takes time. Both effects are
    fitted such that the trials agree best on when each tensor is ready without them; if a GPU
    computes while the CPU launches, both are 0. The fit is least squares of each trial's median, in
    which outlying trials count little, with the usual values as a prior, each as uncertain as it is
    large.
    """
    from scipy.optimize import least_squares  # here: takes long to import

    trials: dict[tuple[tuple[str, Value], ...], list[_Course]] = {}
    for configuration, profile in steps:
        key = tuple(sorted(configuration.items()))
        trials.setdefault(key, []).append(_Course(configuration, profile))
    courses = list(trials.values())

    def medians(figures: Floats) -> Floats:
        """Return when tensors are ready with an idle network, by trial."""
        return np.array(
            [
                np.median([step.idle_ready(*figures.tolist()) for step in trial], axis=0)
                for trial in courses
            ]
        )

    def differences(figures: Floats) -> Floats:
        compared = medians(figures)[:, places]
        apart = (compared - np.median(compared, axis=0)) / spread_seconds / math.sqrt(len(places))
        return np.concatenate([*map(bounded, apart), softened(figures / usual - 1)])

    usual = np.array([CONTENTION, LAUNCH_SECONDS])
    usually = medians(usual)
    places = np.linspace(0, usually.shape[1] - 1, PARTS + 1).astype(int)[1:]
    spread_seconds = SPREAD * max(float(np.median(usually.max(axis=1))), 1e-9)
    found = least_squares(
        differences, usual, bounds=([0.0, 0.0], [np.inf, np.inf]), x_scale=usual,
        max_nfev=MOST_EVALUATIONS,
    ).x.tolist()  # fmt: skip
    every = [step for trial in courses for step in trial]
    ready = np.median([step.idle_ready(*found) for step in every], axis=0)
    forward = np.median([step.began_seconds for step in every])
    return Computing(float(forward), np.maximum.accumulate(np.maximum(ready, 0.0)), *found)


class _Course:
    """What was under way at each moment of a profiled step's backward pass."""

    def __init__(self, configuration: Mapping[str, Value], profile: Profile) -> None:
        # Of a chain's operations the one between the nodes takes almost all the time.
        channels = configuration.get("channels", 1)
        most = channels if isinstance(channels, int) else 1
        stages = 1 if configuration.get("hierarchical", "off") == "off" else 3
        ready = np.array(profile.ready_seconds)
        counts = np.array([parts(bucket.bytes, most) for bucket in profile.buckets])
        starts, begun_parts = _counted([b.started_seconds for b in profile.buckets], counts)
        ends, ended_parts = _counted([b.ended_seconds for b in profile.buckets], counts)
        moments = np.unique(np.concatenate([ready, starts, ends]))
        self.began_seconds = float(ready.min())
        moments = moments[moments >= self.began_seconds]
        begun = begun_parts[np.searchsorted(starts, moments[:-1], "right")]
        under_way = begun - ended_parts[np.searchsorted(ends, moments[:-1], "right")]
        self._lengths = np.diff(moments)
        self._flows = np.sqrt(np.clip(under_way, 0, most))
        # Each tensor's ready time is one of the moments.
        self._places = np.searchsorted(moments, ready)
        self._launches = begun_parts[np.searchsorted(starts, ready, "right")] * stages

    def idle_ready(self, contention: float, launch_seconds: float) -> Floats:
        """Return when each tensor would have been ready, since the first one, with an
        idle network.
        """
        computed = np.cumsum(self._lengths / (1 + contention * self._flows))
        found: Floats = np.concatenate([[0.0], computed])[self._places]
        return found - self._launches * launch_seconds


def _counted(seconds: Sequence[float], counts: Floats) -> tuple[Floats, Floats]:
    """The moments in order, and the number of parts under way before each."""
    order = np.argsort(seconds)
    return np.asarray(seconds)[order], np.concatenate([[0], np.cumsum(counts[order])])

"""What a job computes, from its profiled steps, with what communicating adds taken out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bagua_autotune.model.knobs import Value
from bagua_autotune.model.profile import Profile
from bagua_autotune.simulation.simulator import CONTENTION, LAUNCH_SECONDS

Step = tuple[Mapping[str, Value], Profile]
Floats = NDArray[np.float64]
# By what the length of one step's computing differs from the next one's, as a share of it.
SPREAD = 0.02
# So many moments of the backward pass are compared between steps.
MOMENTS = 8


class Computing(NamedTuple):
    """``ready_seconds`` of each tensor since the first one, ascending, with an idle network."""

    forward_seconds: float
    ready_seconds: Floats
    contention: float
    launch_seconds: float


def fit_computing(steps: Sequence[Step]) -> Computing:
    """Medians over the steps.

    Computing is slower while buckets travel, and launching them takes time. How much of either is
    what makes the steps agree best on when each tensor is ready without them: where a GPU computes
    while the CPU launches, neither costs anything. Least squares with the usual figures as a prior,
    each as uncertain as it is large.
    """
    from scipy.optimize import least_squares  # here: takes long to import

    def differences(figures: Floats) -> Floats:
        idle = np.array([_idle_ready(step, *figures.tolist()) for step in steps])
        places = np.linspace(0, idle.shape[1] - 1, MOMENTS).astype(int)[1:]
        compared = idle[:, places]
        spread = SPREAD * max(float(np.median(idle.max(axis=1))), 1e-9)
        apart = (compared - np.median(compared, axis=0)) / spread / math.sqrt(len(places))
        return np.concatenate([apart.ravel(), figures / usual - 1])

    usual = np.array([CONTENTION, LAUNCH_SECONDS])
    found = least_squares(
        differences, usual, bounds=([0.0, 0.0], [np.inf, np.inf]), x_scale=usual, loss="soft_l1",
        max_nfev=40,
    ).x.tolist()  # fmt: skip
    ready = np.median([_idle_ready(step, *found) for step in steps], axis=0)
    forward = np.median([min(profile.ready_seconds) for _, profile in steps])
    return Computing(float(forward), np.maximum.accumulate(np.maximum(ready, 0.0)), *found)


def _idle_ready(step: Step, contention: float, launch_seconds: float) -> Floats:
    """When each tensor would have been ready, since the first one, with an idle network."""
    configuration, profile = step
    stages = 1 if configuration.get("hierarchical", "off") == "off" else 3
    channels = configuration.get("channels", 1)
    # Of a chain's operations the one between the nodes takes nearly all the time.
    most = channels if isinstance(channels, int) else 1
    began = min(profile.ready_seconds)
    starts = np.sort([bucket.started_seconds for bucket in profile.buckets])
    ends = np.sort([bucket.ended_seconds for bucket in profile.buckets])
    moments = np.unique(np.concatenate([profile.ready_seconds, starts, ends]))
    moments = moments[moments >= began]
    # Between each two moments.
    under_way = np.searchsorted(starts, moments[:-1], "right") - np.searchsorted(
        ends, moments[:-1], "right"
    )
    slowdowns = 1 + contention * np.sqrt(np.clip(under_way, 0, most))
    computed = np.concatenate([[0.0], np.cumsum(np.diff(moments) / slowdowns)])
    ready = np.array(profile.ready_seconds)
    launches = np.searchsorted(starts, ready, "right") * stages * launch_seconds
    idle: Floats = np.interp(ready, moments, computed) - launches
    return idle

"""When gradients are ready, without the time for launching buckets.

The computing thread launches the buckets, which delays everything behind: with many small buckets
this is most of their cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bagua_autotune.costs.collectives import Kind
from bagua_autotune.costs.layouts import Floats
from bagua_autotune.costs.timeline import parts
from bagua_autotune.model.profile import Profile

# Prior of the time to launch one operation, and about its uncertainty.
USUAL_LAUNCH_SECONDS = 20e-6
# How much the computing time differs from step to step.
COMPUTING_SPREAD = 0.03


class Computing(NamedTuple):
    """``ready_seconds`` per tensor in gradient-ready order, not decreasing, without launches."""

    ready_seconds: Floats
    launch_seconds: float


def fit_computing(profiled: Sequence[tuple[Kind, Profile]]) -> Computing | None:
    """Estimate it from some steps; None if there are none.

    The launch cost is the slope of the last ready time over the number of operations, by least
    squares with a normal prior.
    """
    if not profiled:
        return None
    last = np.array([max(profile.ready_seconds) for _, profile in profiled])
    operations = np.array([sum(_launches(kind, profile)) for kind, profile in profiled])
    spread = COMPUTING_SPREAD * max(float(np.median(last)), 1e-9)
    centred = operations - operations.mean()
    precision = float(centred @ centred) / spread**2 + 1 / USUAL_LAUNCH_SECONDS**2
    slope = (centred @ last / spread**2 + 1 / USUAL_LAUNCH_SECONDS) / precision
    launch_seconds = max(float(slope), 0.0)
    alone = [_without_launches(kind, profile, launch_seconds) for kind, profile in profiled]
    ready = np.maximum.accumulate(np.maximum(np.median(alone, axis=0), 0.0))
    return Computing(ready, launch_seconds)


def _without_launches(kind: Kind, profile: Profile, launch_seconds: float) -> Floats:
    ready = np.asarray(profile.ready_seconds, float)
    started = np.array([bucket.started_seconds for bucket in profile.buckets])
    order = np.argsort(started)
    launches = np.concatenate([[0.0], np.cumsum(_launches(kind, profile)[order])])
    before = np.searchsorted(started[order], ready, side="left")
    found: Floats = ready - launch_seconds * launches[before]
    return found


def _launches(kind: Kind, profile: Profile) -> Floats:
    """Count the operations of each bucket; 0 if weights travel instead."""
    if kind.sends.when != "ready":
        return np.zeros(len(profile.buckets))
    sizes_bytes = np.array([bucket.bytes for bucket in profile.buckets], float)
    return kind.operations * parts(sizes_bytes, kind.channel_count)

"""Whether what was best in an earlier run of the same job still is, from one trial of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bagua_autotune.model.job import Job, Trial
from bagua_autotune.model.knobs import Configuration
from bagua_autotune.model.statistics import Estimate, Interval
from bagua_autotune.tuning.objective import Objective

# By what the gain of one run differs from that of another, as a share of the gain, and at least.
GAIN_VARIES = 0.3
GAIN_VARIES_AT_LEAST = 0.01


def stored_best(job: Job) -> Configuration | None:
    """What this round begins with: the best of an earlier run, or of the round before."""
    if job.round > 0 and job.result:
        return job.result.configuration
    if job.inherited and job.inherited.configuration is not None:
        return Configuration(job.inherited.configuration)
    return None


def confirmed_gain(
    job: Job, baseline: Estimate, stored: Estimate, objective: Objective
) -> Interval | None:
    """The gain of the stored best over the baseline, or None if it is not what it was.

    Two short trials say little by themselves; together with the gain of the earlier run, which
    was confirmed at length, they say whether that still holds (the usual weighted mean of two
    measurements).
    """
    if job.round > 0 or job.inherited is None or job.inherited.gain is None:
        return None
    scale = objective.scale(baseline.center)
    expected = job.inherited.gain * scale
    measured = baseline.center - stored.center
    error = math.hypot(*(e.half_width / 1.96 for e in (baseline, stored)))
    spread = max(GAIN_VARIES * expected, GAIN_VARIES_AT_LEAST * scale)
    if not math.isfinite(error) or abs(measured - expected) > 1.96 * math.hypot(error, spread):
        return None
    weight = spread**2 / (spread**2 + error**2)
    center = weight * measured + (1 - weight) * expected
    half_width = 1.96 * error * math.sqrt(weight)
    return Interval(center, center - half_width, center + half_width)


def measured_in(trials: Sequence[Trial], configuration: Configuration) -> Estimate | None:
    """The first measurement of a configuration."""
    return next(
        (t.estimate for t in trials if t.configuration == configuration and t.estimate), None
    )

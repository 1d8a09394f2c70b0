"""The best trial of a job, and how much faster than the baseline it is."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from bagua_autotune.model.job import Job, Trial
from bagua_autotune.model.statistics import Interval
from bagua_autotune.tuning.decision import baseline_estimate, incumbent
from bagua_autotune.tuning.objective import Objective
from bagua_autotune.tuning.rounds import of_round


def is_settled(job: Job) -> bool:
    """Whether its result is the last word: it is not if the job is tuned again."""
    return job.result is not None and job.phase not in ("tuning", "confirming")


def best_trial(job: Job, trials: Sequence[Trial]) -> Trial | None:
    """The first measured one of the final choice, or else of the incumbent, in its last round.

    Args:
        trials: of all rounds.
    """
    if job.result and is_settled(job):
        wanted = job.result.configuration
    else:
        best = incumbent(of_round(trials, job.round))
        if best is None:
            return None
        wanted = best.configuration
    found = [trial for trial in trials if trial.estimate and trial.configuration == wanted]
    return min(found, key=lambda trial: (-trial.round, trial.index), default=None)


def speedup(job: Job, trials: Sequence[Trial], objective: Objective) -> Interval | None:
    """Of the result once there is one, else of the incumbent.

    The latter's bounds are the widest that its own interval and the baseline's allow; infinite
    where one of them was measured by a single value.

    Args:
        trials: of all rounds.
    """
    if job.result and is_settled(job):
        return Interval(job.result.speedup, job.result.low, job.result.high)
    best = best_trial(job, trials)
    baseline = baseline_estimate(job, of_round(trials, job.round))
    if best is None or best.estimate is None or baseline is None:
        return None
    if best.configuration == job.baseline:
        return Interval(1.0, 1.0, 1.0)
    found = best.estimate
    gains = (baseline.center - found.center, baseline.low - found.high, baseline.high - found.low)
    return Interval(
        *(objective.speedup(gain, baseline.center) if isfinite(gain) else gain for gain in gains)
    )

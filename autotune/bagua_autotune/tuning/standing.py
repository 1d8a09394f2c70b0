"""How fast each configuration of a job is: the baseline, the best, the lowest.

Decisions look at trials one by one: the first of the baseline, the one of the lowest cost. The
luckiest of many measurements is too good to be true, so of what is shown the trials of one
configuration are pooled: its standing, and the best. Only trials of one round are compared: what
other rounds measured was another machine, so to say.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

from bagua_autotune.model.job import BEING_TUNED, CUT_SHORT, Job, Trial
from bagua_autotune.model.knobs import Configuration
from bagua_autotune.model.statistics import Estimate, Interval, pooled
from bagua_autotune.tuning.objective import OBJECTIVES
from bagua_autotune.tuning.rounds import of_round


def measured_in(trials: Sequence[Trial], configuration: Configuration) -> Estimate | None:
    """The first measurement of a configuration."""
    return next(
        (t.estimate for t in trials if t.configuration == configuration and t.estimate), None
    )


def baseline_estimate(job: Job, trials: Sequence[Trial]) -> Estimate | None:
    """The first measurement of the job's own configuration."""
    return measured_in(trials, job.baseline)


def lowest(trials: Sequence[Trial]) -> Trial | None:
    """The measured trial of the lowest cost, lucky or not: what an open one is compared with."""
    measured = [(t.estimate.center, t.index, t) for t in trials if t.estimate]
    return min(measured)[2] if measured else None


@dataclass(frozen=True)
class Standing:
    """A configuration, and what all its trials say of its cost."""

    configuration: Configuration
    estimate: Estimate


def standing(trials: Sequence[Trial], configuration: Configuration) -> Estimate | None:
    """What the trials of a configuration say of its cost; None if none was measured.

    Args:
        trials: of one round.
    """
    found = [t.estimate for t in trials if t.configuration == configuration and t.estimate]
    return pooled(found) if found else None


def best(job: Job, trials: Sequence[Trial]) -> Standing | None:
    """The configuration of the lowest cost; what failed is none, unless it is the baseline.

    Args:
        trials: of one round.
    """
    failed = {trial.configuration for trial in trials if trial.state == "failed"} - {job.baseline}
    measured: defaultdict[Configuration, list[Estimate]] = defaultdict(list)
    for trial in trials:
        if trial.estimate and trial.configuration not in failed:
            measured[trial.configuration].append(trial.estimate)
    standings = (Standing(tried, pooled(found)) for tried, found in measured.items())
    return min(standings, key=_cost, default=None)


def course(job: Job, trials: Sequence[Trial]) -> Iterator[tuple[Trial, Standing | None]]:
    """What was best after each trial of a round.

    Its cost rises where a configuration turns out to be slower when it is measured again, or fails.
    """
    measured: defaultdict[Configuration, list[Estimate]] = defaultdict(list)
    standings: dict[Configuration, Standing] = {}
    failed: set[Configuration] = set()
    leader: Standing | None = None
    for trial in trials:
        tried = trial.configuration
        if trial.state == "failed" and tried != job.baseline:
            failed.add(tried)
            standings.pop(tried, None)
        elif trial.estimate and tried not in failed:
            measured[tried].append(trial.estimate)
            standings[tried] = Standing(tried, pooled(measured[tried]))
        if leader is None or leader.configuration == tried:
            leader = min(standings.values(), key=_cost, default=None)
        elif tried in standings:
            leader = min(leader, standings[tried], key=_cost)
        yield trial, leader


def _cost(found: Standing) -> float:
    return found.estimate.center


def is_settled(job: Job) -> bool:
    """Whether its result is the last word: it is not if the job is tuned again."""
    return job.result is not None and job.phase not in BEING_TUNED


def shown_round(job: Job) -> int:
    """The round that is spoken of: the result's own where that is the last word, else the latest.

    They differ where the training ended while the job was tuned again.
    """
    return job.round - 1 if is_settled(job) and job.phase in CUT_SHORT else job.round


def best_configuration(job: Job, trials: Sequence[Trial]) -> Configuration | None:
    """What was kept, or else the best so far; None before something is measured.

    Args:
        trials: of all rounds.
    """
    if job.result and is_settled(job):
        return job.result.configuration
    found = best(job, of_round(trials, job.round))
    return found.configuration if found else None


def best_estimate(job: Job, trials: Sequence[Trial]) -> Estimate | None:
    """What all its trials of the round that is shown say of its cost."""
    wanted = best_configuration(job, trials)
    return standing(of_round(trials, shown_round(job)), wanted) if wanted is not None else None


def best_trial(job: Job, trials: Sequence[Trial]) -> Trial | None:
    """The first measured one of the best configuration, in the round that is shown."""
    wanted = best_configuration(job, trials)
    current = of_round(trials, shown_round(job))
    return next((t for t in current if t.estimate and t.configuration == wanted), None)


def speedup(job: Job, trials: Sequence[Trial]) -> Interval | None:
    """Of the result once there is one, else of the best so far; see speedup_of.

    The latter is not confirmed: that of many configurations which seems the best is partly the
    luckiest.

    Args:
        trials: of all rounds.
    """
    if job.result and is_settled(job):
        return Interval(job.result.speedup, job.result.low, job.result.high)
    current = of_round(trials, job.round)
    leader = best(job, current)
    if leader and leader.configuration == job.baseline:
        return Interval(1.0, 1.0, 1.0)
    return speedup_of(leader.estimate, job, current) if leader else None


def speedup_of(measured: Estimate, job: Job, trials: Sequence[Trial]) -> Interval | None:
    """How many times as fast as the baseline something is; None while that is not measured.

    The baseline counts with all its trials. The bounds are the widest that both intervals allow;
    infinite where one of them was measured by a single value.

    Args:
        trials: of the round in which it was measured.
    """
    baseline = standing(trials, job.baseline)
    if baseline is None:
        return None
    gains = (
        baseline.center - measured.center,
        baseline.low - measured.high,
        baseline.high - measured.low,
    )
    objective = OBJECTIVES[job.protocol]
    return Interval(
        *(objective.speedup(gain, baseline.center) if isfinite(gain) else gain for gain in gains)
    )

"""What follows in a job: a pure function of its trials.

Nothing else is remembered, so a restarted service, or another replica, goes on as if
nothing had happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bagua_autotune.model.job import Job, Purpose, Trial
from bagua_autotune.model.knobs import Configuration
from bagua_autotune.model.statistics import Estimate, Interval
from bagua_autotune.search import Searcher
from bagua_autotune.tuning.confirmation import confirm
from bagua_autotune.tuning.objective import Objective
from bagua_autotune.tuning.stopping import search_has_ended

MOST_FAILURES = 3


@dataclass(frozen=True)
class Propose:
    """Try this configuration next."""

    purpose: Purpose
    configuration: Configuration


@dataclass(frozen=True)
class Keep:
    """Tuning is over; ``gain`` is the winner's over the baseline, in cost."""

    configuration: Configuration
    gain: Interval | None = None
    reason: str = "nothing measured faster"


def decide(
    job: Job,
    candidates: Sequence[Configuration],
    trials: Sequence[Trial],
    objective: Objective,
    make_searcher: Callable[[Sequence[Configuration]], Searcher],
) -> Propose | Keep:
    """Decide what follows when no trial is open.

    Args:
        candidates: the baseline first.
        trials: all of the job's, none of them open.
        make_searcher: builds a fresh one for the candidates given.
    """
    if len(candidates) == 1:
        return Keep(job.baseline, reason="nothing else to try")
    failed = [trial for trial in trials if trial.state == "failed"]
    if _hopeless(job, failed):
        return Keep(job.baseline, reason="the ranks disagreed too often")
    baseline = baseline_estimate(job, trials)
    if baseline is None:
        return Propose("search", job.baseline)
    scale = objective.scale(baseline.center)
    # The baseline stays: it is what a job falls back to.
    banned = {trial.configuration for trial in failed} - {job.baseline}
    allowed = [candidate for candidate in candidates if candidate not in banned]
    winner = _being_confirmed(job, trials, banned)
    if winner is None:
        searches = [trial for trial in trials if trial.purpose == "search"]
        searcher = make_searcher(allowed)
        for trial in searches:
            if trial.estimate:
                searcher.tell(
                    trial.configuration, trial.estimate.center, trial.estimate.standard_error
                )
        is_confirming = len(searches) < len(trials)
        if not is_confirming and not search_has_ended(
            searches, allowed, searcher, job.limits.max_samples, scale
        ):
            return Propose("search", searcher.ask())
        winner = searcher.best()
    if winner == job.baseline:
        return Keep(job.baseline)
    confirmation = confirm(trials, winner, job.baseline, scale)
    if confirmation.next_configuration is not None:
        return Propose("confirm", confirmation.next_configuration)
    if confirmation.gain is None or confirmation.gain.low <= 0:
        return Keep(job.baseline)
    return Keep(winner, confirmation.gain)


def baseline_estimate(job: Job, trials: Sequence[Trial]) -> Estimate | None:
    """The first measurement of the job's own configuration."""
    return next(
        (t.estimate for t in trials if t.configuration == job.baseline and t.estimate), None
    )


def incumbent(trials: Sequence[Trial]) -> Trial | None:
    """The measured trial of the lowest cost."""
    measured = [(t.estimate.center, t.index, t) for t in trials if t.estimate]
    return min(measured)[2] if measured else None


def _hopeless(job: Job, failed: Sequence[Trial]) -> bool:
    """Whether trials fail that should never: the baseline's, or several confirming ones."""
    baseline = sum(trial.configuration == job.baseline for trial in failed)
    confirming = sum(trial.purpose == "confirm" for trial in failed)
    return max(baseline, confirming) >= MOST_FAILURES


def _being_confirmed(
    job: Job, trials: Sequence[Trial], banned: set[Configuration]
) -> Configuration | None:
    """The winner that confirmation has begun with."""
    excluded = banned | {job.baseline}
    return next(
        (
            trial.configuration
            for trial in reversed(trials)
            if trial.purpose == "confirm" and trial.configuration not in excluded
        ),
        None,
    )

"""What follows in a job: a pure function of its trials and of what is known of it.

Nothing else is remembered, so a restarted service, or another replica, goes on as if
nothing had happened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bagua_autotune.model.job import Job, Purpose, Trial
from bagua_autotune.model.knobs import Configuration, Value
from bagua_autotune.model.statistics import Estimate, Interval
from bagua_autotune.search import Problem, Searcher
from bagua_autotune.tuning.confirmation import confirm
from bagua_autotune.tuning.objective import Objective
from bagua_autotune.tuning.stopping import SMALLEST_GAIN, search_has_ended
from bagua_autotune.tuning.warm_start import confirmed_gain, measured_in, stored_best

MOST_FAILURES = 3
# Why a baseline is kept.
NOTHING_FASTER = "nothing measured faster"
BEST_BEFORE = "the best of an earlier run"
# A tuning takes about so many steps at least, and then something must be left to be gained.
FEWEST_REMAINING_STEPS = 100


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
    reason: str = NOTHING_FASTER


def decide(
    job: Job,
    trials: Sequence[Trial],
    objective: Objective,
    problem: Callable[[], Problem],
    make_searcher: Callable[[Problem], Searcher],
) -> Propose | Keep:
    """Decide what follows when no trial is open.

    Args:
        trials: of this round, none of them open.
        problem: all that may be tried, the baseline first; takes a while.
        make_searcher: builds a fresh searcher.
    """
    if job.limits.remaining_steps < FEWEST_REMAINING_STEPS:
        return Keep(job.baseline, reason="too few steps remain to earn a search")
    if not trials and len(problem().candidates) == 1:
        return Keep(job.baseline, reason="nothing else to try")
    failed = [trial for trial in trials if trial.state == "failed"]
    if _hopeless(job, failed):
        return Keep(job.baseline, reason="the ranks disagreed too often")
    # The baseline stays: it is what a job falls back to.
    banned = {trial.configuration for trial in failed} - {job.baseline}
    start = _start(job, trials, banned, objective)
    if start is not None:
        return start
    baseline = baseline_estimate(job, trials)
    assert baseline is not None  # _start proposes it
    scale = objective.scale(baseline.center)
    winner = _being_confirmed(job, trials, banned)
    if winner is None:
        found = _search(job, trials, banned, problem(), make_searcher, scale)
        if isinstance(found, Propose):
            return found
        winner = found
    if winner == job.baseline:
        return Keep(job.baseline)
    confirmation = confirm(trials, winner, job.baseline, scale)
    if confirmation.next_configuration is not None:
        return Propose("confirm", confirmation.next_configuration)
    if confirmation.gain is None or confirmation.gain.low <= 0:
        return Keep(job.baseline)
    return Keep(winner, confirmation.gain)


def _start(
    job: Job, trials: Sequence[Trial], banned: set[Configuration], objective: Objective
) -> Propose | Keep | None:
    """The trials before the search: what runs already, the baseline, what was best before."""
    stored = stored_best(job) if job.limits.max_samples > 1 else None
    if stored in banned:
        stored = None
    # What runs already needs no switch: the baseline at first, the kept one in a later round.
    first = [job.baseline, stored] if job.round == 0 else [stored, job.baseline]
    for configuration in first:
        if configuration is not None and measured_in(trials, configuration) is None:
            return Propose("search", configuration)
    baseline = baseline_estimate(job, trials)
    if stored is None or baseline is None or len(trials) > len(set(first)):
        return None
    if job.round == 0 and stored == job.baseline:
        return Keep(job.baseline, reason=BEST_BEFORE)
    found = measured_in(trials, stored)
    gain = confirmed_gain(job, baseline, found, objective) if found else None
    return Keep(stored, gain) if gain is not None and gain.low > 0 else None


def _search(
    job: Job,
    trials: Sequence[Trial],
    banned: set[Configuration],
    problem: Problem,
    make_searcher: Callable[[Problem], Searcher],
    scale: float,
) -> Propose | Configuration:
    """The next search trial, or the winner of the search."""
    if banned:
        hopeless = _hopeless_values(trials)
        allowed = tuple(
            c for c in problem.candidates if c not in banned and hopeless.isdisjoint(c.items())
        )
        problem = replace(problem, candidates=allowed)
    searches = [trial for trial in trials if trial.purpose == "search"]
    searcher = make_searcher(problem)
    for trial in searches:
        if trial.estimate and trial.configuration not in banned:
            found = trial.estimate
            # In parts of the baseline: the searcher knows what a cost of 0.01 means.
            searcher.tell(trial.configuration, found.center / scale, found.standard_error / scale)
    is_confirming = len(searches) < len(trials)
    if not is_confirming and not search_has_ended(searches, problem, searcher, job.limits):
        return Propose("search", searcher.ask())
    winner = searcher.best()
    gain = searcher.expected_cost(job.baseline) - searcher.expected_cost(winner)
    return winner if gain >= SMALLEST_GAIN or is_confirming else job.baseline


def baseline_estimate(job: Job, trials: Sequence[Trial]) -> Estimate | None:
    """The first measurement of the job's own configuration."""
    return measured_in(trials, job.baseline)


def incumbent(trials: Sequence[Trial]) -> Trial | None:
    """The measured trial of the lowest cost."""
    measured = [(t.estimate.center, t.index, t) for t in trials if t.estimate]
    return min(measured)[2] if measured else None


def _hopeless(job: Job, failed: Sequence[Trial]) -> bool:
    """Whether trials fail that should never: the baseline's, or several confirming ones."""
    baseline = sum(trial.configuration == job.baseline for trial in failed)
    confirming = sum(trial.purpose == "confirm" for trial in failed)
    return max(baseline, confirming) >= MOST_FAILURES


def _hopeless_values(trials: Sequence[Trial]) -> set[tuple[str, Value]]:
    """What several configurations failed with and none was measured with."""
    failed = Counter(
        item for c in {t.configuration for t in trials if t.failure} for item in c.items()
    )
    measured = {item for t in trials if t.estimate for item in t.configuration.items()}
    return {item for item, count in failed.items() if count >= MOST_FAILURES} - measured


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

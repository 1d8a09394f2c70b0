"""What follows in a job: a pure function of its trials and of what is known of it.

Nothing else is remembered, so a restarted service, or another replica, goes on as if
nothing had happened.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bagua_autotune.model.job import Job, Purpose, Result, Trial
from bagua_autotune.model.knobs import LOSSLESS_KNOBS, Configuration, Value
from bagua_autotune.model.statistics import Interval
from bagua_autotune.search import Problem, Searcher
from bagua_autotune.tuning.confirmation import being_confirmed, confirm, confirmed_gain
from bagua_autotune.tuning.objective import Objective
from bagua_autotune.tuning.restart import carried_over, offered_again
from bagua_autotune.tuning.rounds import TRIAL_STEPS, stored_best
from bagua_autotune.tuning.standing import baseline_estimate, measured_in
from bagua_autotune.tuning.stopping import SMALLEST_GAIN, search_has_ended

MOST_FAILURES = 3
# Why a baseline is kept.
NOTHING_FASTER = "nothing was clearly faster"
ONLY_DEFAULT = "only the default was measured"
ONE_SAMPLE = f"{ONLY_DEFAULT} (BAGUA_AUTOTUNE_MAX_SAMPLES=1)"
TIME_WAS_UP = "BAGUA_AUTOTUNE_MAX_MINUTES was over"
BEST_BEFORE = "it was the best in an earlier run"
NOTHING_TO_TRY = "there is nothing else to try"
TOO_FEW_STEPS = "too few steps remain to make up for a search"
DISAGREED = "the ranks disagreed too often"
# The same for programs.
WINNER_CODE = "winner"
DISAGREEMENT_CODE = "disagreement"
DIVERGED_CODE = "diverged"
OTHER_CODE = "other"
HARM = "the training suffered"
# By the event with which ranks give up what they run: what happened, and its code.
GIVING_UP = {
    "disagreement": ("the ranks disagreed", DISAGREEMENT_CODE),
    "diverged": (HARM, DIVERGED_CODE),
}
REASON_CODES = {
    NOTHING_FASTER: "nothing_faster",
    f"{NOTHING_FASTER} before {TIME_WAS_UP}": "nothing_faster",
    ONE_SAMPLE: "only_default",
    f"{ONLY_DEFAULT} before {TIME_WAS_UP}": "only_default",
    BEST_BEFORE: "earlier_best",
    NOTHING_TO_TRY: "nothing_to_try",
    TOO_FEW_STEPS: "too_few_steps",
    DISAGREED: DISAGREEMENT_CODE,
}
# As releases said it that stored no code.
OLDER_REASONS = {
    "nothing measured faster": NOTHING_FASTER,
    "the best of an earlier run": BEST_BEFORE,
    "nothing else to try": NOTHING_TO_TRY,
    "too few steps remain to earn a search": TOO_FEW_STEPS,
}
# A tuning takes about so many steps at least, and then something must be left to be gained.
FEWEST_REMAINING_STEPS = 100


@dataclass(frozen=True)
class Propose:
    """Try this configuration next."""

    purpose: Purpose
    configuration: Configuration


@dataclass(frozen=True)
class Keep:
    """Tuning is over; ``gain`` is the winner's over the baseline, in cost.

    ``reason``: why the baseline is kept; one of REASON_CODES.
    """

    configuration: Configuration
    gain: Interval | None = None
    reason: str = NOTHING_FASTER


def result_code(result: Result) -> str:
    """Why a job was left with what it has, for programs."""
    if result.reason_code:
        return result.reason_code
    # Of a release that stored none: from its sentence.
    if result.kept == "winner":
        return WINNER_CODE
    if result.reason.startswith(GIVING_UP["disagreement"][0]):
        return DISAGREEMENT_CODE
    return REASON_CODES.get(OLDER_REASONS.get(result.reason, result.reason), OTHER_CODE)


def failure_code(failure: str) -> str:
    """Why a trial failed, for programs."""
    return DIVERGED_CODE if failure.startswith(HARM) else DISAGREEMENT_CODE


def decide(
    job: Job,
    trials: Sequence[Trial],
    objective: Objective,
    problem: Callable[[], Problem],
    make_searcher: Callable[[Problem], Searcher],
    trial_steps: float = TRIAL_STEPS,
    most_gain: float = math.inf,
) -> Propose | Keep:
    """Decide what follows when no trial is open.

    Args:
        trials: of this round, none of them open.
        problem: all that may be tried, the baseline first; takes a while.
        make_searcher: builds a fresh searcher.
        trial_steps: of the training, from one trial to the next.
        most_gain: over the baseline, in cost; see ceiling.
    """
    is_new = job.round == 0 and not trials
    if is_new and job.limits.remaining_steps < FEWEST_REMAINING_STEPS:
        return Keep(job.baseline, reason=TOO_FEW_STEPS)
    if len(trials) <= 1 and len(problem().candidates) == 1:
        return Keep(job.baseline, reason=NOTHING_TO_TRY)
    failed = [trial for trial in trials if trial.state == "failed"]
    if _hopeless(job, failed):
        return Keep(job.baseline, reason=DISAGREED)
    known = [*carried_over(job, trials), *trials]
    banned = _banned(job, known)
    start = _start(job, trials, known, banned, objective)
    if start is not None:
        return start
    baseline = baseline_estimate(job, trials)
    assert baseline is not None  # _start proposes it
    scale = objective.scale(baseline.center)
    winner = being_confirmed(job, trials)
    if winner is None:
        allowed = _allowed(job, known, problem())
        found = _search(job, known, allowed, make_searcher, scale, trial_steps, most_gain)
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
    job: Job,
    trials: Sequence[Trial],
    known: Sequence[Trial],
    banned: set[Configuration],
    objective: Objective,
) -> Propose | Keep | None:
    """The trials before the search: what runs already, the baseline, what was best before, what
    was under way."""
    stored = stored_best(job) if job.limits.max_samples > 1 else None
    if stored in banned:
        stored = None
    # What runs already needs no switch: the baseline at first, the kept one in a later round.
    first = [job.baseline, stored] if job.round == 0 else [stored, job.baseline]
    for configuration in first:
        if configuration is not None and measured_in(known, configuration) is None:
            return Propose("search", configuration)
    again = offered_again(job, known, banned)
    if again is not None:
        return Propose("search", again)
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
    problem: Problem,
    make_searcher: Callable[[Problem], Searcher],
    scale: float,
    trial_steps: float,
    most_gain: float,
) -> Propose | Configuration:
    """The next search trial, or the winner of the search."""
    searches = [trial for trial in trials if trial.purpose == "search"]
    searcher = _tell(job, trials, make_searcher(problem), scale)
    is_confirming = len(searches) < len(trials)
    ends = is_confirming or search_has_ended(
        searches, problem, searcher, job.limits, trial_steps, most_gain
    )
    if not ends:
        return Propose("search", searcher.ask())
    winner = searcher.best()
    gain = searcher.expected_cost(job.baseline) - searcher.expected_cost(winner)
    return winner if gain >= SMALLEST_GAIN or is_confirming else job.baseline


def told_searcher(
    job: Job,
    trials: Sequence[Trial],
    objective: Objective,
    problem: Problem,
    make_searcher: Callable[[Problem], Searcher],
) -> tuple[Searcher, Problem] | None:
    """What a round's search knows, and what it may try; None before the baseline is measured.

    The searcher's costs are in parts of the baseline's.
    """
    baseline = baseline_estimate(job, trials)
    if baseline is None:
        return None
    known = [*carried_over(job, trials), *trials]
    problem = _allowed(job, known, problem)
    return _tell(job, known, make_searcher(problem), objective.scale(baseline.center)), problem


def _banned(job: Job, trials: Sequence[Trial]) -> set[Configuration]:
    """What failed. The baseline stays: it is what a job falls back to."""
    return {trial.configuration for trial in trials if trial.state == "failed"} - {job.baseline}


def _allowed(job: Job, trials: Sequence[Trial], problem: Problem) -> Problem:
    """The problem without what failed, and without what is like it."""
    banned = _banned(job, trials)
    if not banned:
        return problem
    hopeless = _hopeless_values(job, trials)
    allowed = tuple(
        c
        for c in problem.candidates
        if c == job.baseline or (c not in banned and hopeless.isdisjoint(c.items()))
    )
    return replace(problem, candidates=allowed)


def _tell(job: Job, trials: Sequence[Trial], searcher: Searcher, scale: float) -> Searcher:
    """Tell it the search trials in parts of the baseline: it knows what a cost of 0.01 means."""
    banned = _banned(job, trials)
    for trial in trials:
        found = trial.estimate
        if trial.purpose == "search" and found and trial.configuration not in banned:
            searcher.tell(trial.configuration, found.center / scale, found.standard_error / scale)
    return searcher


def _hopeless(job: Job, failed: Sequence[Trial]) -> bool:
    """Whether trials fail that should never: the baseline's, or several confirming ones."""
    baseline = sum(trial.configuration == job.baseline for trial in failed)
    confirming = sum(trial.purpose == "confirm" for trial in failed)
    return max(baseline, confirming) >= MOST_FAILURES


def _hopeless_values(job: Job, trials: Sequence[Trial]) -> set[tuple[str, Value]]:
    """What several configurations failed with and none was measured with; and what the training
    suffered from, whatever else was in force."""
    failed = Counter(
        item for c in {t.configuration for t in trials if t.failure} for item in c.items()
    )
    measured = {item for t in trials if t.estimate for item in t.configuration.items()}
    hopeless = {item for item, count in failed.items() if count >= MOST_FAILURES} - measured
    harmful = [
        t.configuration for t in trials if t.failure and failure_code(t.failure) == DIVERGED_CODE
    ]
    return hopeless | {
        (knob, c[knob])
        for c in harmful
        for knob in c
        if knob not in LOSSLESS_KNOBS and c[knob] != job.baseline.get(knob)
    }

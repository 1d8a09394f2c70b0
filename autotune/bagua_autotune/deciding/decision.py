"""What follows in a job: a pure function of its trials and of what is known of it.

Nothing else is remembered, so a restarted service, or another replica, goes on as if
nothing had happened.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cached_property
from statistics import fmean

from bagua_autotune.deciding.room import Room, more_fits, needs_as_much, too_large
from bagua_autotune.deciding.second_visit import denied_once
from bagua_autotune.earlier.restart import carried_over, offered_again
from bagua_autotune.measuring.confirmation import (
    GAIN_THAT_MATTERS,
    MOST_TRIALS,
    confirmed_gain,
    least_shown,
)
from bagua_autotune.measuring.rounds import TRIAL_STEPS, Round, measured_in
from bagua_autotune.measuring.visits import Visits
from bagua_autotune.model.job import Job, Limits, Purpose, Trial
from bagua_autotune.model.knobs import numbers_changed, repeats_change
from bagua_autotune.model.reasons import (
    BEST_BEFORE,
    DIVERGED_CODE,
    NOT_SHOWN,
    NOTHING_FASTER,
    NOTHING_TO_TRY,
    TOO_FEW_STEPS,
    failure_code,
)
from bagua_autotune.model.statistics import Interval
from bagua_autotune.search import USUAL, Judges, Problem, Searcher, make_searcher
from bagua_wire.configuration import Configuration, Value
from bagua_wire.knobs import RECOMPUTED_KNOB
from bagua_wire.messages import DISAGREED

MOST_FAILURES = 3
# A tuning takes about so many steps at least, and then something must be left to be gained.
FEWEST_REMAINING_STEPS = 100
# A bad moment at the default's only visit makes all gains too high, and the best was chosen for
# being lucky: each of the two is visited so often before a gain is believed.
FEWEST_VISITS = 2


@dataclass(frozen=True)
class Propose:
    """Try this configuration next."""

    purpose: Purpose
    configuration: Configuration


@dataclass(frozen=True)
class Keep:
    """Tuning is over; ``gain`` is the winner's over the default, in cost.

    ``reason``: why the default is kept; one of REASON_CODES.
    """

    configuration: Configuration
    gain: Interval | None = None
    reason: str = NOTHING_FASTER


class _Basis:
    """What a decision rests on; each is worked out once."""

    def __init__(self, round_: Round) -> None:
        self.round = round_
        self.job = round_.job
        carried = carried_over(round_)
        self.trials: Sequence[Trial] = [*carried, *round_.trials] if carried else round_.trials

    @cached_property
    def visits(self) -> Visits:
        if self.trials is self.round.trials:
            return self.round.visits
        return Visits(self.trials, self.round.scale)

    @cached_property
    def banned(self) -> set[Configuration]:
        """What is not tried again: what failed, what repeats the harm of something that failed, and
        what does not fit in memory. The default stays: it is what a job falls back to."""
        harmful = [trial.configuration for trial in self.trials if _is_harmful(trial)]
        failed = {
            trial.configuration
            for trial in self.trials
            if trial.state == "failed"
            or any(repeats_change(trial.configuration, o, self.job.baseline) for o in harmful)
        }
        return (failed | set(too_large(self.trials))) - {self.job.baseline}

    @cached_property
    def hopeless_values(self) -> set[tuple[str, Value]]:
        """What several configurations failed with and none was measured with; and what the training
        suffered from, whatever else was in force."""
        harmful = {trial.configuration for trial in self.trials if _is_harmful(trial)}
        others = {trial.configuration for trial in self.trials if trial.state == "failed"} - harmful
        failed = Counter(item for configuration in others for item in configuration.items())
        measured = {item for t in self.trials if t.estimate for item in t.configuration.items()}
        hopeless = {item for item, count in failed.items() if count >= MOST_FAILURES} - measured
        return hopeless.union(*(numbers_changed(c, self.job.baseline) for c in harmful))


def decide(
    round_: Round,
    problem: Callable[[], Problem],
    searcher_for: Callable[[Problem], Searcher],
    trial_steps: float = TRIAL_STEPS,
) -> Propose | Keep:
    """Decide what follows when no trial is open.

    Args:
        round_: what is open of its trials is taken for what the search expects of it.
        problem: all that may be tried, the default first; takes a while.
        searcher_for: builds a fresh searcher.
        trial_steps: of the training, from one trial to the next.
    """
    job, trials = round_.job, round_.trials
    is_new = round_.number == 0 and not trials
    if is_new and job.limits.remaining_steps < FEWEST_REMAINING_STEPS:
        return Keep(job.baseline, reason=TOO_FEW_STEPS)
    if len(trials) <= 1 and len(problem().candidates) == 1:
        return Keep(job.baseline, reason=NOTHING_TO_TRY)
    if _hopeless(job, [trial for trial in trials if trial.is_given_up]):
        return Keep(job.baseline, reason=DISAGREED)
    basis = _Basis(round_)
    start = _start(basis)
    if start is not None:
        return start
    allowed = _allowed(basis, problem())
    searcher = _tell(basis, searcher_for(allowed), with_open=True)
    found = _search(basis, allowed, searcher, trial_steps)
    if not isinstance(found, Configuration):
        return found
    if found == job.baseline:
        return Keep(job.baseline)
    # What runs was measured by nobody yet, whatever is expected of it.
    judge = _tell(basis, searcher_for(allowed)) if round_.open_trial else searcher
    if not isinstance(judge, Judges):
        judge = _tell(basis, make_searcher(USUAL, allowed))
    assert isinstance(judge, Judges)  # the usual one is
    return _confirm(basis, judge.gain(found, job.baseline), found)


def _confirm(basis: _Basis, found: Interval, winner: Configuration) -> Propose | Keep:
    """What follows a search: another visit to one of the two sides, until it is sure which of them
    is faster. Which is the best may change meanwhile.

    Args:
        found: the winner's gain so far, in parts of the default's cost.
    """
    round_, job = basis.round, basis.job
    # Of this round: an earlier run's machine may have been another one.
    trials = round_.visits.undisturbed
    own, default = (
        sum(trial.configuration == side and trial.estimate is not None for trial in trials)
        for side in (winner, job.baseline)
    )
    gain = Interval(*(round_.scale * each for each in (found.center, found.low, found.high)))
    is_seen = min(own, default) >= FEWEST_VISITS
    if is_seen and gain.low > 0:
        return Keep(winner, gain)
    confirming = sum(trial.purpose == "confirm" for trial in round_.trials)
    if (
        round_.is_out_of_time
        or confirming >= MOST_TRIALS
        or (is_seen and gain.high < GAIN_THAT_MATTERS * round_.scale)
    ):
        return Keep(job.baseline)
    is_next = own <= default and default >= FEWEST_VISITS
    return Propose("confirm", winner if is_next else job.baseline)


def _start(basis: _Basis) -> Propose | Keep | None:
    """The trials before the search: what runs already, the default, what was best before, what
    was under way."""
    round_, job, trials = basis.round, basis.job, basis.trials
    stored = round_.stored_best if job.limits.max_samples > 1 else None
    if stored in basis.banned or (stored and basis.hopeless_values & set(stored.items())):
        stored = None
    # What runs already needs no switch: the default at first, the kept one in a later round.
    first = [job.baseline, stored] if round_.number == 0 else [stored, job.baseline]
    for configuration in first:
        if configuration is not None and measured_in(trials, configuration) is None:
            return Propose("search", configuration)
    again = offered_again(round_, trials, basis.banned)
    if again is not None:
        return Propose("search", again)
    baseline = round_.defaults.first
    if stored is None or baseline is None or len(round_.trials) > len(set(first)):
        return None
    if more_fits(round_):
        return None
    if round_.number == 0 and stored == job.baseline:
        return Keep(job.baseline, reason=BEST_BEFORE)
    found = measured_in(round_.trials, stored)
    gain = confirmed_gain(round_, baseline, found) if found else None
    return Keep(stored, gain) if gain is not None and gain.low > 0 else None


def _search(
    basis: _Basis,
    problem: Problem,
    searcher: Searcher,
    trial_steps: float,
) -> Propose | Keep | Configuration:
    """The next search trial, or the winner of the search.

    Args:
        searcher: was told all trials.
    """
    job, trials, scale = basis.job, basis.trials, basis.round.scale
    visits = basis.visits
    searches = [trial for trial in trials if trial.purpose == "search"]
    is_confirming = len(searches) < len(trials)
    ending: Ending | None = Ending.ENOUGH
    if not is_confirming:
        ending = why_search_ends(
            searches, problem, searcher, job.limits, visits, trial_steps, _most_gain(basis, problem)
        )
    if ending is None:
        return Propose("search", searcher.ask())
    if ending is Ending.NOT_SHOWN:
        return Keep(job.baseline, reason=NOT_SHOWN)
    winner = searcher.best()
    begun = sum(trial.was_tried for trial in searches)
    if not is_confirming and begun < job.limits.max_samples:
        lowest = searcher.expected_cost(winner) * scale
        again = denied_once(visits, problem, lowest)
        if again is not None:
            return Propose("search", again)
    gain = searcher.expected_cost(job.baseline) - searcher.expected_cost(winner)
    return winner if gain >= SMALLEST_GAIN or is_confirming else job.baseline


def _most_gain(basis: _Basis, problem: Problem) -> float:
    """The most that can be gained over the default, in cost; infinite where it is not known."""
    round_, default = basis.round, basis.round.defaults.first
    floor = round_.floor
    if floor is None or default is None:
        return round_.most_gain
    fewest = min(each.number(RECOMPUTED_KNOB) for each in problem.candidates)
    return default.center - floor.cost if floor.recomputed <= fewest else math.inf


def told_searcher(
    round_: Round, problem: Problem, make_searcher: Callable[[Problem], Searcher]
) -> tuple[Searcher, Problem] | None:
    """Return what a round's search knows, and what it may try; None before the default is measured.

    The searcher's costs are in parts of the default's.
    """
    if round_.defaults.first is None:
        return None
    basis = _Basis(round_)
    problem = _allowed(basis, problem)
    return _tell(basis, make_searcher(problem)), problem


def _allowed(basis: _Basis, problem: Problem) -> Problem:
    """The problem without what failed, and without what is like it."""
    banned = basis.banned
    if not banned:
        return problem
    hopeless, unfit = basis.hopeless_values, too_large(basis.trials)
    room = Room(basis.trials, basis.job.baseline)
    # The search is told what is measured, and what to expect of what runs.
    told = {trial.configuration for trial in basis.trials if trial.estimate or trial.is_open}
    kept = {basis.job.baseline, *told} - banned
    allowed = tuple(
        c
        for c in problem.candidates
        if c in kept
        or (
            c not in banned
            and hopeless.isdisjoint(c.items())
            and not any(needs_as_much(c, other) for other in unfit)
            and room.may_fit(c)
        )
    )
    return replace(problem, candidates=allowed)


def _tell(basis: _Basis, searcher: Searcher, with_open: bool = False) -> Searcher:
    """Tell the searcher the trials' costs in parts of the default's: it knows what a cost of 0.01
    means.

    Args:
        with_open: a trial that runs cost what the searcher expects of it.
    """
    scale = basis.round.scale
    for trial in basis.visits.undisturbed:
        found = trial.estimate
        if found and trial.configuration not in basis.banned:
            # What visits differ by the search finds by itself, from all that it is told.
            error = basis.visits.error_inside(found) / scale
            searcher.tell(trial.configuration, found.center / scale, error)
    for trial in basis.trials if with_open else ():
        if trial.is_open:
            expected = searcher.expected_cost(trial.configuration)
            searcher.tell(trial.configuration, expected, basis.visits.step_spread / scale)
    return searcher


def _hopeless(job: Job, given_up: Sequence[Trial]) -> bool:
    """Whether trials fail that should never: the default's, or several confirming ones."""
    baseline = sum(trial.configuration == job.baseline for trial in given_up)
    failed = (trial for trial in given_up if trial.state == "failed" and not _is_harmful(trial))
    confirming = sum(trial.purpose == "confirm" for trial in failed)
    return max(baseline, confirming) >= MOST_FAILURES


def _is_harmful(trial: Trial) -> bool:
    return failure_code(trial.failure or "") == DIVERGED_CODE


# When the search ends: when what is still to be gained is less than what finding it costs.

# Differences that a live job does not show, however many steps remain.
SMALLEST_GAIN = 0.005
WORTH_A_TRIAL = 0.008
# What a trial costs besides running a slower configuration: the re-cut and a few slow steps.
SWITCH_STEPS = 1.0
# So many trials that find nothing better end the search, whatever the searcher still expects:
# on a machine that gets steadily slower it mistakes the drift for noise and hopes for ever.
PATIENCE_TRIALS = 7
# With a cost model fewer, and the fewer the longer they are: noise makes them long and is what the
# searcher mistakes for hope.
PATIENCE_WITH_MODEL = (3, 5)
PATIENCE_STEPS = 26
# Nor more of them than take so many steps of the training.
PATIENCE_STEPS_IN_ALL = 75
# A cost model that misses more than so much of what was profiled, as a logarithm, is none.
MISFIT = 0.06


class Ending(Enum):
    """Why a search ends: ``ENOUGH`` was tried, or the most that can be gained is ``NOT_SHOWN`` by
    any confirmation."""

    ENOUGH = auto()
    NOT_SHOWN = auto()


def why_search_ends(
    trials: Sequence[Trial],
    problem: Problem,
    searcher: Searcher,
    limits: Limits,
    visits: Visits,
    trial_steps: float = TRIAL_STEPS,
    most_gain: float = math.inf,
) -> Ending | None:
    """Why the search trials so far are enough; None: they are not. Costs are in parts of the
    default's.

    Args:
        trials: the search trials, failed ones too: they cost time as well. Of those that were not
            tried, as they would not fit, there may be as many again.
        problem: what may still be proposed.
        searcher: told of all measured ones.
        limits: the most search trials, and the steps over which a gain counts.
        visits: of the round; they say what gain a confirmation shows.
        trial_steps: of the training, from one trial to the next.
        most_gain: over the default, by the communication that it does not hide; see ceiling.
    """
    # Of one that runs the searcher was told what it expects.
    measured = [trial for trial in trials if trial.estimate or trial.is_open]
    begun = sum(trial.was_tried for trial in trials)
    if max(begun, len(trials) - begun) >= limits.max_samples:
        return Ending.ENOUGH
    if set(problem.candidates) <= {trial.configuration for trial in measured}:
        return Ending.ENOUGH
    shown = least_shown(visits) / visits.scale
    if RECOMPUTED_KNOB in problem.space:
        default, best = (
            searcher.expected_cost(c) for c in (problem.candidates[0], searcher.best())
        )
        if most_gain - (default - best) < shown:
            # The best computes as little as can be, and hides its communication.
            return Ending.ENOUGH
    elif (
        len(measured) >= searcher.initial_trials
        and most_gain < shown
        and not _is_clearly_beaten(problem.candidates[0], measured)
    ):
        return Ending.NOT_SHOWN
    beyond = 1 if problem.predictor else 2
    if len(measured) < searcher.initial_trials + beyond:
        return None
    if _only_repeats_best(searcher, problem.candidates[0], measured):
        return Ending.ENOUGH
    worthwhile = max(
        WORTH_A_TRIAL, _cost_of_a_trial(searcher, trial_steps) / limits.remaining_steps
    )
    if searcher.expected_gain() < worthwhile:
        return Ending.ENOUGH
    patience = PATIENCE_TRIALS
    if problem.predictor and problem.predictor.misfit < MISFIT:
        patience = _patience_with_model(measured)
    in_all = max(round(PATIENCE_STEPS_IN_ALL / trial_steps), PATIENCE_WITH_MODEL[0])
    patience = min(patience, in_all)
    if len(measured) < searcher.initial_trials + patience:
        return None
    allowed = set(problem.candidates)
    tried = [trial.configuration for trial in measured if trial.configuration in allowed]
    is_idle = _gain_of_last(patience, tried, searcher) < SMALLEST_GAIN
    return Ending.ENOUGH if is_idle else None


def _only_repeats_best(
    searcher: Searcher, baseline: Configuration, measured: Sequence[Trial]
) -> bool:
    """Whether the next trial is what is best now, which is measured again at the end anyway; not
    the default where that is best, so the search looks at it twice."""
    if searcher.ask() != searcher.best():
        return False
    visits_to_default = sum(trial.configuration == baseline for trial in measured)
    return searcher.best() != baseline or visits_to_default >= FEWEST_VISITS


def _is_clearly_beaten(baseline: Configuration, measured: Sequence[Trial]) -> bool:
    """Whether something was faster by more than noise, so that computing itself takes less time
    with other messages. The default's own steps cannot tell that."""
    estimates = [(t.configuration == baseline, t.estimate) for t in measured if t.estimate]
    lows = [estimate.low for is_own, estimate in estimates if is_own]
    highs = [estimate.high for is_own, estimate in estimates if not is_own]
    return bool(lows and highs) and min(highs) < min(lows) - SMALLEST_GAIN


def _patience_with_model(measured: Sequence[Trial]) -> int:
    """How many trials that find nothing better are enough."""
    fewest, most = PATIENCE_WITH_MODEL
    steps = fmean(trial.estimate.count for trial in measured if trial.estimate)
    return min(max(round(PATIENCE_STEPS / steps), fewest), most)


def _cost_of_a_trial(searcher: Searcher, trial_steps: float) -> float:
    """The cost of the next trial, in steps: its own are longer by what it is slower."""
    slower = searcher.expected_cost(searcher.ask()) - searcher.expected_cost(searcher.best())
    return SWITCH_STEPS + trial_steps * max(0.0, math.expm1(min(slower, 10.0)))


def _gain_of_last(count: int, tried: Sequence[Configuration], searcher: Searcher) -> float:
    """Return how much the last trials lowered the best expected cost, as all trials tell it now."""
    before = [searcher.expected_cost(configuration) for configuration in set(tried[:-count])]
    since = [searcher.expected_cost(configuration) for configuration in set(tried)]
    return min(before) - min(since) if before else math.inf

"""What follows in a job: a pure function of its trials and of what is known of it.

Nothing else is remembered, so a restarted service, or another replica, goes on as if
nothing had happened.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from bagua_autotune.deciding.ending import (
    FEWEST_VISITS,
    GAIN_THAT_MATTERS,
    MOST_TRIALS,
    SMALLEST_GAIN,
    confirmed_gain,
    denied_once,
    why_search_ends,
)
from bagua_autotune.deciding.room import Room, more_fits, needs_as_much, too_large
from bagua_autotune.earlier.restart import carried_over, offered_again
from bagua_autotune.measuring.rounds import TRIAL_STEPS, Round, measured_in
from bagua_autotune.measuring.standing import standing
from bagua_autotune.measuring.visits import Visits
from bagua_autotune.model.job import Job, Purpose, Trial
from bagua_autotune.model.knobs import numbers_changed, repeats_change
from bagua_autotune.model.reasons import (
    BEST_BEFORE,
    DIVERGED_CODE,
    NOT_SHOWN,
    NOTHING_FASTER,
    NOTHING_FITS,
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
        others = {trial.state for trial in basis.trials if trial.configuration != job.baseline}
        fits_alone = len(allowed.candidates) == 1 and others == {"infeasible"}
        return Keep(job.baseline, reason=NOTHING_FITS if fits_alone else NOTHING_FASTER)
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
    is_searched = len(round_.trials) > len(set(first))
    if stored is None or baseline is None or is_searched or more_fits(round_):
        return None
    if round_.number == 0 and stored == job.baseline:
        return Keep(job.baseline, reason=BEST_BEFORE)
    found = measured_in(round_.trials, stored)
    gain = confirmed_gain(round_, baseline, found) if found else None
    return Keep(stored, gain) if gain is not None and gain.low > 0 else None


def _search(
    basis: _Basis, problem: Problem, searcher: Searcher, trial_steps: float
) -> Propose | Keep | Configuration:
    """The next search trial, or the winner of the search.

    Args:
        searcher: was told all trials.
    """
    job, trials, scale = basis.job, basis.trials, basis.round.scale
    visits = basis.visits
    searches = [trial for trial in trials if trial.purpose == "search"]
    if len(searches) < len(trials):  # it is being confirmed
        return searcher.best()
    why = why_search_ends(
        *(searches, problem, searcher, job.limits, visits, trial_steps, basis.round.most_gain),
        left_to_gain=_left_to_gain(basis, problem, searcher),
    )
    if why is None:
        return Propose("search", searcher.ask())
    if why == NOT_SHOWN:
        return Keep(job.baseline, reason=NOT_SHOWN)
    winner = searcher.best()
    if sum(trial.was_tried for trial in searches) < job.limits.max_samples:
        again = denied_once(visits, problem, searcher.expected_cost(winner) * scale)
        if again is not None:
            return Propose("search", again)
    gain = searcher.expected_cost(job.baseline) - searcher.expected_cost(winner)
    return winner if gain >= SMALLEST_GAIN else job.baseline


def _left_to_gain(basis: _Basis, problem: Problem, searcher: Searcher) -> float:
    """The most that can be gained over the best of this round's, in parts of the default's cost;
    infinite where it is not known, or where others compute less."""
    round_, floor = basis.round, basis.round.floor
    if floor is None:
        return math.inf
    fewest = min(each.number(RECOMPUTED_KNOB) for each in problem.candidates)
    found = standing(round_.visits.undisturbed, searcher.best())
    if floor.recomputed > fewest or found is None:
        return math.inf
    error = round_.visits.error_inside(found, searcher.best())
    return (found.center + error - floor.cost) / round_.scale


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
            error = basis.visits.error_inside(found, trial.configuration) / scale
            searcher.tell(trial.configuration, found.center / scale, error)
    for trial in basis.trials if with_open else ():
        if trial.is_open:
            expected = searcher.expected_cost(trial.configuration)
            searcher.tell(
                trial.configuration, expected, basis.visits.spread_like(trial.configuration) / scale
            )
    return searcher


def _hopeless(job: Job, given_up: Sequence[Trial]) -> bool:
    """Whether trials fail that should never: the default's, or several confirming ones."""
    baseline = sum(trial.configuration == job.baseline for trial in given_up)
    failed = (trial for trial in given_up if trial.state == "failed" and not _is_harmful(trial))
    confirming = sum(trial.purpose == "confirm" for trial in failed)
    return max(baseline, confirming) >= MOST_FAILURES


def _is_harmful(trial: Trial) -> bool:
    return failure_code(trial.failure or "") == DIVERGED_CODE

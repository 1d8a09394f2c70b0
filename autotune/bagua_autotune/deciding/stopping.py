"""When the search ends: when what is still to be gained is less than what finding it costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum, auto
from statistics import fmean

from bagua_autotune.measuring.confirmation import GAIN_THAT_MATTERS
from bagua_autotune.measuring.rounds import TRIAL_STEPS
from bagua_autotune.model.job import Limits, Trial
from bagua_autotune.model.knobs import Configuration
from bagua_autotune.search import Problem, Searcher

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
    trial_steps: float = TRIAL_STEPS,
    most_gain: float = math.inf,
    least_shown: float = GAIN_THAT_MATTERS,
) -> Ending | None:
    """Why the search trials so far are enough; None: they are not. Costs are in parts of the
    default's.

    Args:
        trials: the search trials, failed ones too: they cost time as well. Of those that were not
            tried, as they would not fit, there may be as many again.
        problem: what may still be proposed.
        searcher: told of all measured ones.
        limits: the most search trials, and the steps over which a gain counts.
        trial_steps: of the training, from one trial to the next.
        most_gain: over the default, by the communication that it does not hide; see ceiling.
        least_shown: the smallest gain that a confirmation shows; see there.
    """
    measured = [trial for trial in trials if trial.state == "measured"]
    begun = sum(trial.was_tried for trial in trials)
    if max(begun, len(trials) - begun) >= limits.max_samples:
        return Ending.ENOUGH
    if set(problem.candidates) <= {trial.configuration for trial in measured}:
        return Ending.ENOUGH
    shows_nothing = most_gain < least_shown and len(measured) >= searcher.initial_trials
    if shows_nothing and not _is_clearly_beaten(problem.candidates[0], measured):
        return Ending.NOT_SHOWN
    beyond = 1 if problem.predictor else 2
    if len(measured) < searcher.initial_trials + beyond:
        return None
    if searcher.ask() == searcher.best():
        # What is best now is measured again at the end anyway, beside the default.
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

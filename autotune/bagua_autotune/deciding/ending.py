"""When the search ends: when what is still to be gained is less than what finding it costs, or than
what a confirmation can show. And what is then looked at once more.

The winner of a search is partly the luckiest one, so it and the default are measured again before
it is kept; see ``deciding/decision.py``. What was best in an earlier run of the same job was
confirmed there: one trial says whether it still is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache
from statistics import median

import numpy as np

from bagua_autotune.measuring.rounds import TRIAL_STEPS, Round
from bagua_autotune.measuring.visits import MOST_STEPS, Visits
from bagua_autotune.model.job import Limits, Trial
from bagua_autotune.model.knobs import Categorical
from bagua_autotune.model.reasons import NOT_SHOWN, NOTHING_FASTER
from bagua_autotune.model.statistics import Estimate, Interval
from bagua_autotune.search import Predictor, Problem, Searcher
from bagua_autotune.search.process import expected_improvements
from bagua_wire.configuration import Configuration

# A bad moment at the default's only visit makes all gains too high, and the best was chosen for
# being lucky: each of the two is visited so often before a gain is believed.
FEWEST_VISITS = 2
# Differences that a live job does not show, however many steps remain.
SMALLEST_GAIN = 0.005
# Where less than this is expected of the next trial, or of a second visit, it is not worth one.
WORTH_A_TRIAL = 0.01
# What a trial costs besides running a slower configuration: the re-cut and a few slow steps.
SWITCH_STEPS = 1.0
# So many trials that find nothing better end the search, whatever the searcher still expects: on a
# machine that gets steadily slower it mistakes the drift for noise and hopes for ever. Fewer do
# where trials are long, so that all of them take about so many steps; but never less than three.
PATIENCE_TRIALS, PATIENCE_STEPS, FEWEST_PATIENCE_TRIALS = 9, 75, 3


def why_search_ends(
    trials: Sequence[Trial],
    problem: Problem,
    searcher: Searcher,
    limits: Limits,
    visits: Visits,
    trial_steps: float = TRIAL_STEPS,
    most_gain: float = math.inf,
    left_to_gain: float = math.inf,
) -> str | None:
    """Why the search trials so far are enough: NOTHING_FASTER than the best of them is expected, or
    the most that can be gained is NOT_SHOWN by any confirmation. None: they are not enough.

    Args:
        trials: the search trials, failed ones too: they cost time as well. Of those that were not
            tried, as they would not fit, there may be as many again.
        problem: what may still be proposed.
        searcher: told of all measured ones, in parts of the default's cost.
        limits: the most search trials, and the steps over which a gain counts.
        visits: of the round; they say what gain a confirmation shows.
        trial_steps: of the training, from one trial to the next.
        most_gain: over the default, by the communication that it does not hide; see Ceiling.
        left_to_gain: over the best, likewise, where no configuration computes less; see Floor.
    """
    default = problem.candidates[0]
    # Of one that runs the searcher was told what it expects.
    measured = [trial for trial in trials if trial.estimate or trial.is_open]
    begun = sum(trial.was_tried for trial in trials)
    is_full = max(begun, len(trials) - begun) >= limits.max_samples
    if is_full or set(problem.candidates) <= {trial.configuration for trial in measured}:
        return NOTHING_FASTER
    learned_from = len(measured) - searcher.initial_trials
    shown = least_shown(visits) / visits.scale
    if left_to_gain < shown:
        return NOTHING_FASTER
    if learned_from >= 0 and most_gain < shown and not _is_clearly_beaten(default, measured):
        return NOT_SHOWN
    if learned_from < (1 if problem.predictor else 2):
        return None
    cost_of_a_trial = _cost_of_a_trial(searcher, trial_steps) / limits.remaining_steps
    if (
        _only_repeats_best(searcher, default, measured)
        or searcher.expected_gain() < max(WORTH_A_TRIAL, cost_of_a_trial)
    ):  # fmt: skip
        return NOTHING_FASTER
    patience = max(round(PATIENCE_STEPS / trial_steps), FEWEST_PATIENCE_TRIALS)
    patience = min(patience, PATIENCE_TRIALS)
    if learned_from < patience:
        return None
    allowed = set(problem.candidates)
    tried = [trial.configuration for trial in measured if trial.configuration in allowed]
    is_idle = _gain_of_last(patience, tried, searcher) < SMALLEST_GAIN
    return NOTHING_FASTER if is_idle else None


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
    lows = [t.estimate.low for t in measured if t.estimate and t.configuration == baseline]
    highs = [t.estimate.high for t in measured if t.estimate and t.configuration != baseline]
    return bool(lows and highs) and min(highs) < min(lows) - SMALLEST_GAIN


def _cost_of_a_trial(searcher: Searcher, trial_steps: float) -> float:
    """The cost of the next trial, in steps: its own are longer by what it is slower."""
    slower = searcher.expected_cost(searcher.ask()) - searcher.expected_cost(searcher.best())
    return SWITCH_STEPS + trial_steps * max(0.0, math.expm1(min(slower, 10.0)))


def _gain_of_last(count: int, tried: Sequence[Configuration], searcher: Searcher) -> float:
    """Return how much the last trials lowered the best expected cost, as all trials tell it now."""
    before = [searcher.expected_cost(configuration) for configuration in set(tried[:-count])]
    since = [searcher.expected_cost(configuration) for configuration in set(tried)]
    return min(before) - min(since) if before else math.inf


# What a confirmation can show, and what an earlier run's has shown.

# Of a confirmation, about half of them the default's.
MOST_TRIALS = 12
# What is less is not worth another trial.
GAIN_THAT_MATTERS = 0.01
# By what the gain of one run differs from that of another, as a share of the gain, and at least.
GAIN_VARIES, GAIN_VARIES_AT_LEAST = 0.3, 0.01
# A gain of so many standard errors of the two sides alone is shown in four of five usual intervals:
# 1.96 for one without zero, 0.84 so that 80 % have none (Cohen, "Statistical power analysis", ch.
# 2). What is claimed asks for more, and rests on more.
SHOWN_ERRORS = 2.8


def least_shown(visits: Visits) -> float:
    """The smallest gain that a confirmation of full length mostly shows, and that matters."""
    steps = MOST_STEPS["confirm"]
    inside = visits.step_spread / math.sqrt(steps)
    error = visits.error(Estimate(0.0, inside, steps)) * math.sqrt(4 / MOST_TRIALS)
    return max(GAIN_THAT_MATTERS * visits.scale, SHOWN_ERRORS * error)


def confirmed_gain(round_: Round, baseline: Estimate, stored: Estimate) -> Interval | None:
    """The gain of the stored best over the default, or None if it is not what it was.

    Two short trials say little by themselves; together with the gain of the earlier run, which
    was confirmed at length, they say whether that still holds (the usual weighted mean of two
    measurements).
    """
    inherited = round_.job.inherited
    if round_.number > 0 or inherited is None or inherited.gain is None:
        return None
    scale = round_.scale
    expected = inherited.gain * scale
    measured = baseline.center - stored.center
    error = math.hypot(*(e.half_width / 1.96 for e in (baseline, stored)))
    spread = max(GAIN_VARIES * expected, GAIN_VARIES_AT_LEAST * scale)
    if not math.isfinite(error) or abs(measured - expected) > 1.96 * math.hypot(error, spread):
        return None
    weight = spread**2 / (spread**2 + error**2)
    center = weight * measured + (1 - weight) * expected
    half_width = 1.96 * error * math.sqrt(weight)
    return Interval(center, center - half_width, center + half_width)


# A second visit to what one visit denies, before it is given up.
#
# One bad moment of a link would else rule out a level of a knob (8 channels, say) for good: its
# visit was slow, and the cost model learned from the same steps that the level is. So the model is
# asked what it promised of the level without that visit.

# A visit denies what is promised if it is slower by so much, and by so many standard errors.
DENIED, SURELY = 0.2, 2.0
# A level that was visited more often is known.
FEW_VISITS = 3


def denied_once(visits: Visits, problem: Problem, lowest: float) -> Configuration | None:
    """What to visit once more; None if nothing was given up too early.

    Args:
        visits: of the round; those in bad moments count for nothing.
        lowest: the expected cost of the best, in the trials' own unit.
    """
    if problem.without is None:
        return None
    fitted, scale = cache(problem.without), visits.scale  # A trial may be of several levels.
    measured = [trial for trial in visits.undisturbed if trial.estimate]
    best: tuple[float, Configuration | None] = (0.0, None)
    for trial, members in _rarely_visited(measured, problem, lowest + DENIED * scale):
        others = [each for each in measured if each.index != trial.index]
        model = fitted(trial.index)
        if model is None or len(others) < 2 or not trial.estimate:
            continue
        # By how much measured costs lie over those that are predicted.
        predicted = model.predict([each.configuration for each in others]).tolist()
        costs = [each.estimate.center / scale for each in others if each.estimate]
        level = median(cost - each for cost, each in zip(costs, predicted, strict=True))
        expected = float(model.predict([trial.configuration])[0]) + level
        error = visits.error(trial.estimate, trial.configuration) / scale
        if trial.estimate.center / scale - expected < DENIED + SURELY * error:
            continue
        gain = _expected_gain(model, members, lowest / scale - level)
        best = max(best, (gain, trial.configuration), key=lambda pair: pair[0])
    return best[1] if best[0] >= WORTH_A_TRIAL else None


def _rarely_visited(
    measured: Sequence[Trial], problem: Problem, limit: float
) -> list[tuple[Trial, list[Configuration]]]:
    """Slow trials of levels that are not the default's and have few visits, none of them to the
    trial's configuration; and all candidates of the level."""
    baseline = problem.candidates[0]
    times = Counter(trial.configuration for trial in measured)
    found: list[tuple[Trial, list[Configuration]]] = []
    for knob, domain in problem.space.items():
        for value in domain.values if isinstance(domain, Categorical) else ():
            own = [trial for trial in measured if trial.configuration.get(knob) == value]
            if len(own) > FEW_VISITS or value == baseline.get(knob):
                continue
            members = [c for c in problem.candidates if c.get(knob) == value]
            found += [
                (trial, members)
                for trial in own
                if times[trial.configuration] == 1
                and trial.estimate
                and trial.estimate.center > limit
            ]
    return found


def _expected_gain(model: Predictor, members: Sequence[Configuration], lowest: float) -> float:
    """By how much the best of a level is expected to be faster than the best so far."""
    means = model.predict(members)
    place = int(np.argmin(means))
    deviations = np.asarray(model.deviations([members[place]]))
    error = max(float(np.sqrt(np.square(deviations).sum())), model.misfit, 1e-6)
    return float(expected_improvements(means[[place]] - lowest, np.array([error]))[0])

"""A second visit to what one visit denies, before it is given up.

One bad moment of a link would else rule out a configuration, or a level of a knob (8 channels, say)
for good: its visit was slow, and the cost model learned from the same steps that it is. So the
model is asked what it promised without that visit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from statistics import median

import numpy as np

from bagua_autotune.measuring.visits import Visits
from bagua_autotune.model.job import Trial
from bagua_autotune.model.knobs import Categorical, Configuration
from bagua_autotune.search import Predictor, Problem

# Where so much is expected in spite of a slow visit, another one is worth it.
WORTH_A_VISIT = 0.008
# A visit denies what is promised if it is slower by so much, and by so many standard errors.
DENIED, SURELY = 0.2, 2.0
# A level that was visited more often is known.
FEW_VISITS = 3


def denied_once(
    trials: Sequence[Trial], problem: Problem, lowest: float, scale: float = 1.0
) -> Configuration | None:
    """What to visit once more; None if nothing was given up too early.

    Args:
        trials: measured ones of the round, without those in bad moments.
        lowest: the expected cost of the best, in the trials' own unit.
        scale: the difference of costs that is 100 %.
    """
    if problem.without is None or _was_refuted(trials, lowest + DENIED * scale):
        return None
    fitted = cache(problem.without)  # A trial may be of several levels.
    measured = [trial for trial in trials if trial.estimate]
    visits = Visits.of(measured, scale)
    found: list[tuple[float, Configuration]] = []
    for trial, members in _denied(measured, problem, lowest + DENIED * scale):
        others = [each for each in measured if each.index != trial.index]
        model = fitted(trial.index)
        if model is None or len(others) < 2 or not trial.estimate:
            continue
        level = _level(model, others, scale)
        expected = float(model.predict([trial.configuration])[0]) + level
        error = visits.error(trial.estimate) / scale
        if trial.estimate.center / scale - expected < DENIED + SURELY * error:
            continue
        gain = _expected_gain(model, members, lowest / scale - level)
        found.append((gain, trial.configuration))
    gain, configuration = max(found, key=lambda pair: pair[0], default=(0.0, None))
    return configuration if gain >= WORTH_A_VISIT else None


def _was_refuted(trials: Sequence[Trial], limit: float) -> bool:
    """Whether a second visit was as slow as the first: then it is the model that errs."""
    visits = Counter(t.configuration for t in trials if t.estimate and t.estimate.center > limit)
    return max(visits.values(), default=0) > 1


def _denied(
    measured: Sequence[Trial], problem: Problem, limit: float
) -> list[tuple[Trial, list[Configuration]]]:
    """Slow trials of what was visited once, and what they may have ruled out: the configuration
    itself, or all candidates of a level that is not the default's and has few visits."""
    baseline = problem.candidates[0]
    times = Counter(trial.configuration for trial in measured)
    slow = [
        trial
        for trial in measured
        if times[trial.configuration] == 1 and trial.estimate and trial.estimate.center > limit
    ]
    found = [(trial, [trial.configuration]) for trial in slow if trial.configuration != baseline]
    for knob, domain in problem.space.items():
        for value in domain.values if isinstance(domain, Categorical) else ():
            visits = sum(trial.configuration.get(knob) == value for trial in measured)
            if visits > FEW_VISITS or value == baseline.get(knob):
                continue
            members = [c for c in problem.candidates if c.get(knob) == value]
            found += [(trial, members) for trial in slow if trial.configuration.get(knob) == value]
    return found


def _level(model: Predictor, measured: Sequence[Trial], scale: float) -> float:
    """By how much measured costs lie over those that are predicted."""
    predicted = model.predict([trial.configuration for trial in measured])
    costs = [trial.estimate.center / scale for trial in measured if trial.estimate]
    return float(median(c - each for c, each in zip(costs, predicted.tolist(), strict=True)))


def _expected_gain(model: Predictor, members: Sequence[Configuration], lowest: float) -> float:
    """By how much the best of a level is expected to be faster than the best so far."""
    from scipy.stats import norm  # here: takes long to import

    means = model.predict(members)
    place = int(np.argmin(means))
    deviations = np.asarray(model.deviations([members[place]]))
    error = max(float(np.sqrt(np.square(deviations).sum())), model.misfit, 1e-6)
    below = (lowest - float(means[place])) / error
    return error * float(below * norm.cdf(below) + norm.pdf(below))

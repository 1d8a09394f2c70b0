"""A second visit to what one visit denies, before it is given up.

One bad moment of a link would else rule out a level of a knob (8 channels, say) for good: its visit
was slow, and the cost model learned from the same steps that the level is. So the model is asked
what it promised of the level without that visit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from statistics import median

import numpy as np

from bagua_autotune.measuring.visits import Visits
from bagua_autotune.model.job import Trial
from bagua_autotune.model.knobs import Categorical
from bagua_autotune.search import Predictor, Problem
from bagua_wire.configuration import Configuration

# Expected of a level whose visit was as slow as that, a visit is worth it.
WORTH_A_VISIT = 0.008
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
    found: list[tuple[float, Configuration]] = []
    for trial, members in _rarely_visited(measured, problem, lowest + DENIED * scale):
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


def _level(model: Predictor, measured: Sequence[Trial], scale: float) -> float:
    """By how much measured costs lie over those that are predicted."""
    predicted = model.predict([trial.configuration for trial in measured])
    costs = [trial.estimate.center / scale for trial in measured if trial.estimate]
    return float(median(c - each for c, each in zip(costs, predicted.tolist(), strict=True)))


def _expected_gain(model: Predictor, members: Sequence[Configuration], lowest: float) -> float:
    """By how much the best of a level is expected to be faster than the best so far."""
    from bagua_autotune.search.process import expected_improvements  # here: takes long to import

    means = model.predict(members)
    place = int(np.argmin(means))
    deviations = np.asarray(model.deviations([members[place]]))
    error = max(float(np.sqrt(np.square(deviations).sum())), model.misfit, 1e-6)
    return float(expected_improvements(means[[place]] - lowest, np.array([error]))[0])

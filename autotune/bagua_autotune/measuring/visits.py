"""What differs between visits of one configuration, learned from what was visited more than once.

A visit are the steps between two switches. The same configuration takes longer at one visit than at
another, by more than the spread inside a visit shows: memory lies elsewhere, other jobs come and
go. So a visit is a sample with an error of its own, however many steps it has.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from statistics import fmean, median

from bagua_autotune.model.job import Trial
from bagua_autotune.model.statistics import MEDIAN_INEFFICIENCY, Estimate
from bagua_wire.configuration import Configuration

# A guess of what visits differ by, as a part of the default's cost, and of how many visits more it
# is worth: few say little.
USUAL_VISIT_ERROR, PRIOR_VISITS = 0.015, 3
# Of the spread of steps inside a visit, before one is known; as many steps' worth says what a visit
# of few steps does not know of its own.
USUAL_STEP_SPREAD, PRIOR_STEPS = 0.03, 3
FEWEST_STEPS = 3
# A visit was in a bad moment if another one of the same configuration was so much faster, and by so
# many standard errors: links of two hosts were seen at half their speed for some seconds.
BAD_MOMENT, BAD_MOMENT_ERRORS = 0.3, 5.0


class Visits:
    """Trials of a round, and what their visits say together; each is worked out once, when it is
    asked for.

    Args:
        trials: they do not change any more.
        scale: the difference of costs that is 100 %.
    """

    def __init__(self, trials: Sequence[Trial], scale: float = 1.0) -> None:
        self.trials = trials
        self.scale = scale

    @cached_property
    def step_spread(self) -> float:
        """The standard deviation between steps of a typical visit: a pause in one of them says
        nothing of the others."""
        found = [trial.estimate for trial in self.trials if trial.estimate]
        known = [_spread(each) for each in found if each.count >= FEWEST_STEPS]
        return median(known) if known else USUAL_STEP_SPREAD * self.scale

    @cached_property
    def visit_error(self) -> float:
        """That between visits of one configuration."""
        usual = USUAL_VISIT_ERROR * self.scale
        squares, degrees = PRIOR_VISITS * usual**2, float(PRIOR_VISITS)
        for visited in self._repeated:
            own = [t.estimate for t in visited if t.estimate and t.index not in self.in_bad_moments]
            centers = [e.center - own[0].center for e in own]
            inside = fmean(self.error_inside(e) ** 2 for e in own)
            beyond = sum((c - fmean(centers)) ** 2 for c in centers) - (len(own) - 1) * inside
            squares, degrees = squares + max(0.0, beyond), degrees + len(own) - 1
        return math.sqrt(squares / degrees)

    def error_inside(self, found: Estimate) -> float:
        """The standard error of a visit's centre by the spread of its steps; of few steps mostly
        by that of others."""
        own = _spread(found) ** 2 if found.count > 1 else 0.0
        degrees = max(0, found.count - 1)
        squares = degrees * own + PRIOR_STEPS * self.step_spread**2
        spread = math.sqrt(squares / (degrees + PRIOR_STEPS))
        inefficiency = MEDIAN_INEFFICIENCY if found.count > 2 else 1.0
        return inefficiency * spread / math.sqrt(max(found.count, 1))

    def error(self, found: Estimate) -> float:
        """The standard error of a visit as a measurement of its configuration."""
        return math.hypot(self.error_inside(found), self.visit_error)

    @cached_property
    def undisturbed(self) -> list[Trial]:
        """Those that were not in a bad moment."""
        return [trial for trial in self.trials if trial.index not in self.in_bad_moments]

    @cached_property
    def in_bad_moments(self) -> set[int]:
        """The indices of trials that something else made slow: their configuration was far faster
        at another visit. Nothing makes a step faster by accident; but what is slow more often than
        not is slow."""
        found: set[int] = set()
        for own in self._repeated:
            fastest = min(own, key=_center)
            limit = _center(fastest) + BAD_MOMENT * self.scale
            errors = BAD_MOMENT_ERRORS * self.step_spread
            slow = [t for t in own if _center(t) > limit + errors * _wide(t, fastest)]
            if len(slow) <= len(own) - len(slow):
                found |= {trial.index for trial in slow}
        return found

    @cached_property
    def _repeated(self) -> list[list[Trial]]:
        """The measured trials of each configuration that has several."""
        grouped: defaultdict[Configuration, list[Trial]] = defaultdict(list)
        for trial in self.trials:
            if trial.estimate:
                grouped[trial.configuration].append(trial)
        return [own for own in grouped.values() if len(own) > 1]


def _wide(one: Trial, other: Trial) -> float:
    """The standard error of the difference of two visits, where that of a step is 1."""
    return math.sqrt(sum(1 / t.estimate.count for t in (one, other) if t.estimate))


def _center(trial: Trial) -> float:
    assert trial.estimate is not None  # only measured ones are compared
    return trial.estimate.center


def _spread(found: Estimate) -> float:
    return found.standard_error * math.sqrt(found.count) / MEDIAN_INEFFICIENCY

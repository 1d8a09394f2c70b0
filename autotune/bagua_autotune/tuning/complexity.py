"""Step times without what only their data made long.

Of a training whose batches differ, the ranks may tell the complexity of each (tokens, say). How
much longer a step takes for more of it is learned from the first trial of a round, and taken out
of the step times of all its trials: each counts as if its batch had been the usual one. A
complexity that does not explain the step times is not used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from bagua_autotune.model.statistics import estimate

# So many steps of the first trial teach it. That trial runs what the job runs anyway, so a few
# steps more cost nothing.
LEARNING_STEPS = 16
# It is used if the interval becomes so much narrower. A random complexity does that to 16 steps
# in less than 1 % of trainings (tests/autotune/tuning/test_complexity.py).
NARROWED = 0.7
# A trial whose own interval is so much narrower without does not wait for its data.
NARROWER_WITHOUT = 0.5
# No step is taken for shorter than this part of it: then its complexity was wrong.
SHORTEST = 0.1


class Step(NamedTuple):
    """How long a step took, and the complexity of its largest batch."""

    seconds: float
    complexity: float


@dataclass(frozen=True)
class Correction:
    """What the complexity of a batch does to a step.

    Attributes:
        seconds_each: by which a unit of complexity makes a step longer.
        usual: the complexity that all steps are brought to.
        narrowed: the interval of the steps that taught it over what it would be without.
    """

    seconds_each: float
    usual: float
    narrowed: float

    def seconds(self, steps: Sequence[Step]) -> list[float]:
        """The step times of one trial, as of the usual batch; as they are where the trial does not
        wait for its data."""
        plain = [step.seconds for step in steps]
        corrected = _corrected(steps, self.seconds_each, self.usual)
        if len(steps) > 1 and _width(plain) < NARROWER_WITHOUT * _width(corrected):
            return plain
        return corrected


def learn(steps: Sequence[Step]) -> Correction | None:
    """What the complexity does to these steps of one configuration; None where it explains little
    of how they differ, or where a larger one makes them shorter.

    The slope is that of Theil and Sen, the median of those between all pairs of steps (Sen,
    "Estimates of the regression coefficient based on Kendall's tau", 1968): a checkpoint or a wrong
    complexity does not move it. Fewer than LEARNING_STEPS teach nothing.
    """
    if len(steps) < LEARNING_STEPS or len({step.complexity for step in steps}) < 2:
        return None
    from scipy.stats import theilslopes  # here: takes long to import

    plain = [step.seconds for step in steps]
    complexities = [step.complexity for step in steps]
    found = theilslopes(plain, complexities)
    usual = median(complexities)
    corrected = _corrected(steps, float(found.slope), usual)
    before, after = _width(plain), _width(corrected)
    if not (found.low_slope > 0 and before > 0 and after <= NARROWED * before):
        return None
    return Correction(float(found.slope), usual, after / before)


def describe(correction: Correction | None) -> str:
    """For whoever reports a complexity: what became of it."""
    if correction is None:
        return (
            "the reported batch complexity is not used: it does not explain the differences "
            "between step times"
        )
    return (
        f"step times are corrected to a batch complexity of {correction.usual:.4g}; this makes the "
        f"interval of the first trial {correction.narrowed:.2g} times as wide"
    )


def _corrected(steps: Sequence[Step], seconds_each: float, usual: float) -> list[float]:
    return [
        max(step.seconds - seconds_each * (step.complexity - usual), SHORTEST * step.seconds)
        for step in steps
    ]


def _width(seconds: Sequence[float]) -> float:
    """Of the interval; relative, as costs are."""
    return estimate([math.log(value) for value in seconds]).half_width

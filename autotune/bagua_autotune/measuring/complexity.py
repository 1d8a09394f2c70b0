"""Corrects step times for the data of each step.

The ranks report the complexity of their batches: what the training tells (tokens, say), else how
many elements the model's inputs have. Where it varies, the service learns from the first trial of a
round how much longer a larger complexity makes a step. It then corrects the step times of all
trials of the round to one complexity, so that trials are compared and not their data. A complexity
that does not explain the step times is not used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from bagua_autotune.model.statistics import estimate

# The correction is learned from so many steps of the first trial. That trial is what the job runs
# anyway, so a few more steps of it cost nothing.
LEARNING_STEPS = 16
# The correction is used if it makes their interval at most so many times as wide. A random
# complexity passes in less than 1 % of trainings (tests/autotune/measuring/test_complexity.py).
NARROWED = 0.7
# A trial is not corrected if its interval is less than so many times as wide without: then its
# steps do not depend on their data.
NARROWER_WITHOUT = 0.5
# No step is corrected to less than this part of its time: a complexity may be wrong.
SHORTEST = 0.1


class Step(NamedTuple):
    """How long a step took, and the complexity of its largest batch."""

    seconds: float
    complexity: float


@dataclass(frozen=True)
class Correction:
    """How to correct step times.

    Attributes:
        seconds_each: by which a unit of complexity makes a step longer.
        usual: the complexity that all steps are corrected to.
        narrowed: the width of the first trial's interval, corrected over uncorrected.
    """

    seconds_each: float
    usual: float
    narrowed: float

    def seconds(self, steps: Sequence[Step]) -> list[float]:
        """The corrected step times of one trial; uncorrected if that makes its interval clearly
        narrower."""
        plain = [step.seconds for step in steps]
        corrected = _corrected(steps, self.seconds_each, self.usual)
        if len(steps) > 1 and _width(plain) < NARROWER_WITHOUT * _width(corrected):
            return plain
        return corrected


def varies(steps: Sequence[Step]) -> bool:
    """Whether there is anything to correct for."""
    return len({step.complexity for step in steps}) > 1


def is_learning(steps: Sequence[Step]) -> bool:
    """Whether a few more of them would teach something."""
    return len(steps) < LEARNING_STEPS and varies(steps)


def learn(steps: Sequence[Step]) -> Correction | None:
    """The correction by these steps of one configuration; None if the complexity explains little of
    their differences, or if larger ones belong to shorter steps.

    The slope is that of Theil and Sen, the median of those between all pairs of steps (Sen,
    "Estimates of the regression coefficient based on Kendall's tau", 1968): a checkpoint or a wrong
    complexity does not move it. Fewer than LEARNING_STEPS teach nothing.
    """
    if len(steps) < LEARNING_STEPS or not varies(steps):
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
    """Say to the users of the job whether the complexity is used."""
    if correction is None:
        return (
            "the batches' complexity is not used: it does not explain the differences "
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
    """The half width of the interval; relative, as costs are."""
    return estimate([math.log(value) for value in seconds]).half_width

"""Robust statistics of noisy costs (lower is better; the unit is the objective's).

Centres are medians and spreads are median absolute deviations, so that a garbage collection
or a checkpoint moves neither; outliers are counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

# Iglewicz and Hoaglin, "How to Detect and Handle Outliers" (1993): |modified z| > 3.5.
OUTLIER_SCORE = 3.5
# A normal's standard deviation over its median and over its mean absolute deviation.
SIGMA_PER_MEDIAN_DEVIATION = 1.4826
SIGMA_PER_MEAN_DEVIATION = 1.2533
# Standard error of a median over that of a mean, for a normal: sqrt(pi / 2).
MEDIAN_INEFFICIENCY = 1.2533


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval."""

    center: float
    low: float
    high: float


@dataclass(frozen=True)
class Estimate:
    """The centre of some costs. ``standard_error`` is infinite for a single cost.

    ``count`` is the number of costs that the centre rests on, ``outliers`` of those left out.
    """

    center: float
    standard_error: float
    count: int
    outliers: int = 0

    @property
    def half_width(self) -> float:
        """Half the width of the 95 % interval."""
        if self.count < 2:
            return math.inf
        return _student_quantile(self.count - 1) * self.standard_error

    @property
    def low(self) -> float:
        return self.center - self.half_width

    @property
    def high(self) -> float:
        return self.center + self.half_width


def estimate(costs: Sequence[float]) -> Estimate:
    """Estimate the centre of ``costs``.

    Raises:
        ValueError: no cost, or one that is not finite.
    """
    if not costs:
        raise ValueError("no costs to estimate from")
    if not all(math.isfinite(cost) for cost in costs):
        raise ValueError("a cost is not finite")
    limit = OUTLIER_SCORE * _sigma(costs)
    center = median(costs)
    kept = [cost for cost in costs if abs(cost - center) <= limit]
    center = median(kept)
    error = math.inf
    if len(kept) > 1:
        error = MEDIAN_INEFFICIENCY * _sigma(kept) / math.sqrt(len(kept))
    return Estimate(center, error, len(kept), len(costs) - len(kept))


def difference(first: Sequence[Estimate], second: Sequence[Estimate]) -> Interval:
    """How far the costs of ``first`` lie above those of ``second``.

    Each side is several blocks measured in turns.  Blocks differ by more than the spread
    inside them tells (other load, other temperature), so the variance of a block's centre
    is the pooled variance between blocks, or the mean one inside them if that is larger.

    Raises:
        ValueError: a side without blocks.
    """
    if not first or not second:
        raise ValueError("both sides need at least one block")
    center = fmean(block.center for block in first) - fmean(block.center for block in second)
    errors = [block.standard_error for block in (*first, *second)]
    within = [error**2 for error in errors if math.isfinite(error)] or [0.0]
    degrees = len(first) + len(second) - 2
    if degrees:
        between = (_squared_deviations(first) + _squared_deviations(second)) / degrees
    else:  # one block on each side: what is known is the spread inside them
        between = 0.0
        degrees = sum(block.count - 1 for block in (*first, *second))
        if not degrees:
            return Interval(center, -math.inf, math.inf)
    spread = max(between, fmean(within))
    error = math.sqrt(spread * (1 / len(first) + 1 / len(second)))
    half_width = _student_quantile(degrees) * error
    return Interval(center, center - half_width, center + half_width)


def _squared_deviations(blocks: Sequence[Estimate]) -> float:
    mean = fmean(block.center for block in blocks)
    return sum((block.center - mean) ** 2 for block in blocks)


def _sigma(costs: Sequence[float]) -> float:
    """A normal's standard deviation from the median absolute deviation."""
    center = median(costs)
    deviations = [abs(cost - center) for cost in costs]
    typical = median(deviations)
    if typical > 0:
        return SIGMA_PER_MEDIAN_DEVIATION * typical
    # More than half the costs are equal: the mean deviation still sees the others.
    return SIGMA_PER_MEAN_DEVIATION * fmean(deviations)


def _student_quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's t."""
    from scipy.special import stdtrit  # here: takes long to import

    return float(stdtrit(degrees, 0.975))

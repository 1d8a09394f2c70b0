"""Robust statistics of noisy costs (lower is better; the unit is the objective's).

A centre is a mean. Outliers are told by the median absolute deviation, counted and then left out:
a garbage collection, a checkpoint. What is slow more often is no accident, and counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

# Iglewicz and Hoaglin, "How to Detect and Handle Outliers" (1993), call |modified z| > 3.5 an
# outlier.  That many standard deviations are exceeded with this probability on one side; from
# few costs the deviation is not known well, and Student's t asks for more of them.
OUTLIER_TAIL = 2.3263e-4
# Accidents are rare: one of up to so many costs, two of up to twice as many. Where more would be
# left out, none is.
COSTS_PER_OUTLIER = 7
# A normal's standard deviation over its median and over its mean absolute deviation.
SIGMA_PER_MEDIAN_DEVIATION = 1.4826
SIGMA_PER_MEAN_DEVIATION = 1.2533
# By what the median absolute deviation of so few falls short (Croux and Rousseeuw, "Time-efficient
# algorithms for two highly robust estimators of scale", 1992); n / (n - 0.8) above.
SMALL_SAMPLE_FACTORS = {
    2: 1.196, 3: 1.495, 4: 1.363, 5: 1.206, 6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107,
}  # fmt: skip
CONFIDENCE = 0.975

PRIOR_REPEATS = 2


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
        return _student_quantile(self.count - 1, CONFIDENCE) * self.standard_error

    @property
    def low(self) -> float:
        return self.center - self.half_width

    @property
    def high(self) -> float:
        return self.center + self.half_width


def estimate(costs: Sequence[float]) -> Estimate:
    """Estimate the centre of ``costs``.

    Its 95 % interval holds the truth 94 to 97 % of the time, from 3 normal or moderately skewed
    costs on (tests/autotune/model/test_statistics.py measures it). Of few costs only what is very
    far is an outlier: of four, by 34 times their median deviation, of seven by 12 times.

    Raises:
        ValueError: no cost, or one that is not finite.
    """
    if not costs:
        raise ValueError("no costs to estimate from")
    if not all(math.isfinite(cost) for cost in costs):
        raise ValueError("a cost is not finite")
    center = median(costs)
    limit = math.inf
    if len(costs) > 1:
        limit = _student_quantile(len(costs) - 1, 1 - OUTLIER_TAIL) * _sigma(costs)
    kept = [cost for cost in costs if abs(cost - center) <= limit]
    if len(costs) - len(kept) > math.ceil(len(costs) / COSTS_PER_OUTLIER):
        kept = list(costs)
    error = stdev(kept) / math.sqrt(len(kept)) if len(kept) > 1 else math.inf
    center += fmean(cost - center for cost in kept)  # equal costs keep their digits
    return Estimate(center, error, len(kept), len(costs) - len(kept))


def pooled(blocks: Sequence[Estimate]) -> Estimate:
    """Return what several measurements of one thing say together: their mean, weighted by
    precision.

    The weights are the usual ones, one over the squared standard error, but no error counts as less
    than the typical one: what blocks differ by beyond their spread is not in it, and one of few
    costs is small by chance. A block of an unknown error counts like one cost of the others. Where
    the centres lie further apart than the errors say, the error of the mean grows with them (the
    scale factor of the Particle Data Group, "Review of Particle Physics", introduction, section
    5.2.2); it is infinite where nothing is known of it.

    Raises:
        ValueError: no block.
    """
    if not blocks:
        raise ValueError("no blocks to pool")
    if len(blocks) == 1:
        return blocks[0]
    inside = _error_inside(blocks)
    errors = _known_errors(blocks)
    weights = [(inside / max(inside, error)) ** 2 if inside > 0 else 1.0 for error in errors]
    total = sum(weights)
    # Differences from one of them: costs of any size keep their digits.
    offsets = [block.center - blocks[0].center for block in blocks]
    mean = sum(w * offset for w, offset in zip(weights, offsets, strict=True)) / total
    squares = sum(w * (offset - mean) ** 2 for w, offset in zip(weights, offsets, strict=True))
    between = math.sqrt(squares / ((len(blocks) - 1) * total))
    return Estimate(
        blocks[0].center + mean,
        max(inside / math.sqrt(total), between),
        sum(block.count for block in blocks),
        sum(block.outliers for block in blocks),
    )


def deviation_of_repeats(repeats: Iterable[Sequence[float]], usual: float) -> float:
    """By how much costs of one configuration differ, as a standard deviation.

    Args:
        repeats: the costs of each configuration; one cost says nothing.
        usual: a guess, which counts as ``PRIOR_REPEATS`` costs more (the usual scaled inverse
            chi-squared prior: Gelman et al., "Bayesian Data Analysis", section 2.6).
    """
    squares, degrees = PRIOR_REPEATS * usual**2, PRIOR_REPEATS
    for costs in filter(None, repeats):
        squares += sum((cost - fmean(costs)) ** 2 for cost in costs)
        degrees += len(costs) - 1
    return math.sqrt(squares / degrees)


def _error_inside(blocks: Sequence[Estimate]) -> float:
    """The standard error of a typical block's centre, from the spread inside them.

    The median: one block with a pause in it, too short to tell, says nothing of the others.
    """
    known = [block.standard_error for block in blocks if math.isfinite(block.standard_error)]
    return median(known) if known else 0.0


def _known_errors(blocks: Sequence[Estimate]) -> list[float]:
    """Standard errors; where one is not known, that of a single cost of the least sure other."""
    known = [b.standard_error * math.sqrt(b.count) for b in blocks if _has_error(b)]
    of_one = max(known, default=0.0)
    return [b.standard_error if _has_error(b) else of_one for b in blocks]


def _has_error(block: Estimate) -> bool:
    return math.isfinite(block.standard_error)


def _sigma(costs: Sequence[float]) -> float:
    """A normal's standard deviation from the median absolute deviation; at least two costs."""
    center = median(costs)
    deviations = [abs(cost - center) for cost in costs]
    typical = median(deviations)
    if typical > 0:
        factor = SMALL_SAMPLE_FACTORS.get(len(costs), len(costs) / (len(costs) - 0.8))
        return SIGMA_PER_MEDIAN_DEVIATION * factor * typical
    # More than half the costs are equal: the mean deviation still sees the others.
    return SIGMA_PER_MEAN_DEVIATION * fmean(deviations)


def _student_quantile(degrees: float, probability: float) -> float:
    """The quantile of Student's t."""
    from scipy.special import stdtrit  # here: takes long to import

    return float(stdtrit(degrees, probability))

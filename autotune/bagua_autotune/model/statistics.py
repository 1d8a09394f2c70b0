"""Robust statistics of noisy costs (lower is better; the unit is the objective's).

Centres are medians, and outliers are told by the median absolute deviation, so that a garbage
collection or a checkpoint moves neither; outliers are counted and then left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

# Iglewicz and Hoaglin, "How to Detect and Handle Outliers" (1993), call |modified z| > 3.5 an
# outlier.  That many standard deviations are exceeded with this probability on one side; from
# few costs the deviation is not known well, and Student's t asks for more of them.
OUTLIER_TAIL = 2.3263e-4
# Where it is known from others what costs differ by: so many standard deviations, unless less than
# this share of the costs would be kept.
OUTLIER_SPREADS, LEAST_KEPT = 6.0, 0.6
# A normal's standard deviation over its median and over its mean absolute deviation.
SIGMA_PER_MEDIAN_DEVIATION = 1.4826
SIGMA_PER_MEAN_DEVIATION = 1.2533
# By what the median absolute deviation of so few falls short (Croux and Rousseeuw, "Time-efficient
# algorithms for two highly robust estimators of scale", 1992); n / (n - 0.8) above.
SMALL_SAMPLE_FACTORS = {
    2: 1.196, 3: 1.495, 4: 1.363, 5: 1.206, 6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107,
}  # fmt: skip
# Standard error of a median over that of a mean, for a normal: sqrt(pi / 2).
MEDIAN_INEFFICIENCY = 1.2533
CONFIDENCE = 0.975
# Of a difference that is looked at again and again until it is clear: that many looks are paid for
# by asking more of each (Pocock, "Group sequential methods in the design and analysis of clinical
# trials", Biometrika 64, 1977: 0.984 to 0.992 for 2 to 6 looks).
CONFIDENCE_OF_LOOKS = 0.99
# A guess of the spread between blocks, in parts of the scale, which counts as so many blocks: that
# inside them says nothing of it (the same setting minutes apart differed by 1 to 10 %).
USUAL_BETWEEN, PRIOR_BLOCKS = 0.02, 2
# The standard error of a block that was disturbed is more than so many times a typical one's.
DISTURBED = 4.0
# A side of which its blocks say less than this is not known at all; its error stays finite.
SMALLEST_SHARE = 1e-9


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


def estimate(costs: Sequence[float], usual_spread: float = 0.0) -> Estimate:
    """Estimate the centre of ``costs``.

    Its 95 % interval holds the truth 94 to 97 % of the time, from 3 normal or moderately skewed
    costs on (tests/autotune/model/test_statistics.py measures it).

    Args:
        usual_spread: the standard deviation of other such costs; 0: not known. From four costs
            alone nobody can tell that one of them is an outlier.

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
    usual = [cost for cost in kept if abs(cost - center) <= OUTLIER_SPREADS * usual_spread]
    if usual_spread and len(usual) >= LEAST_KEPT * len(costs):
        kept = usual
    center = median(kept)
    error = math.inf
    if len(kept) > 1:
        error = MEDIAN_INEFFICIENCY * stdev(kept) / math.sqrt(len(kept))
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


def difference(
    blocks: Sequence[Estimate],
    is_first: Sequence[bool],
    positions: Sequence[int] | None = None,
    repeats: Sequence[Sequence[Estimate]] = (),
    scale: float = 1.0,
) -> Interval:
    """How far the costs of one side's blocks lie above those of the other's.

    A machine that gets steadily slower or faster is part of the fit: least squares of the
    blocks' centres on their side and their position.  What blocks differ by beyond that (other
    load, other temperature) is their variance; few blocks do not show it well, so that a guess of
    it counts as some blocks more (the usual scaled inverse chi-squared prior: Gelman et al.,
    "Bayesian Data Analysis", section 2.6), and it is never less than the spread inside them.  A
    block that was disturbed knows its own centre badly and counts for so much less (weighted least
    squares).  But its own configuration may be what disturbs it.  So the interval never leaves out
    what all blocks say counted alike; where the others say something else, and a side has less than
    two undisturbed ones, it holds 0 as well.

    It is wider than one that is looked at once: after each block someone asks whether it is enough.

    Args:
        blocks: in the order in which they were measured, which should alternate.
        is_first: of each block, whether it is of the side that is compared with the other.
        positions: where each block stands among all that was measured; by default one after the
            other.
        repeats: blocks of other configurations, those of each together: they show as well what
            blocks differ by.
        scale: the difference of costs that is 100 %.

    Raises:
        ValueError: a side has less than two blocks.
    """
    if min(sum(is_first), len(blocks) - sum(is_first)) < 2:
        raise ValueError("each side needs at least two blocks")
    fit = _fit(blocks, is_first, positions)
    inside = _error_inside(blocks)
    expected = inside**2 + (USUAL_BETWEEN * scale) ** 2
    others = [[block.center for block in group] for group in repeats]
    between, degrees = spread_of_repeats(others, expected, fit.squares, fit.degrees)
    quantile = _student_quantile(degrees, CONFIDENCE_OF_LOOKS)
    half_width = fit.factor * quantile * max(between, inside)
    held = [fit.center - half_width, fit.center + half_width]
    if not held[0] <= fit.alike <= held[1]:
        held.append(fit.alike)
        if fit.undisturbed < 2:
            held.append(0.0)
    return Interval(fit.center, min(held), max(held))


@dataclass(frozen=True)
class _Fit:
    """How far one side lies above the other, by least squares.

    Attributes:
        center: with each block weighted by how well it knows its centre.
        alike: with all blocks weighted alike.
        factor: the error of ``center``, where a block's is 1.
        squares: what the blocks are off the fit.
        degrees: of freedom, in ``squares``.
        undisturbed: blocks of the side that has fewer of them.
    """

    center: float
    alike: float
    factor: float
    squares: float
    degrees: float
    undisturbed: int


def _fit(
    blocks: Sequence[Estimate], is_first: Sequence[bool], positions: Sequence[int] | None
) -> _Fit:
    import numpy as np  # here: takes long to import

    sides = np.array(is_first, float)
    places = np.arange(len(blocks)) if positions is None else np.array(positions, float)
    design = np.stack([np.ones(len(blocks)), places - places.mean(), sides], axis=1)
    # Differences from one of them: costs of any size keep their digits.
    centers = np.array([block.center - blocks[0].center for block in blocks])
    alike = np.linalg.lstsq(design, centers, rcond=None)[0]
    inside = _error_inside(blocks)
    roots = np.array([_precision(block, inside) for block in blocks])
    weighted = design * roots[:, None]
    solution = np.linalg.lstsq(weighted, centers * roots, rcond=None)[0]
    # What only the side explains: little of it is a large error, never none.
    others, side = weighted[:, :2], weighted[:, 2]
    alone = side - others @ np.linalg.lstsq(others, side, rcond=None)[0]
    return _Fit(
        center=float(solution[2]),
        alike=float(alike[2]),
        factor=1.0 / max(float(np.linalg.norm(alone)), SMALLEST_SHARE),
        squares=float(np.sum(np.square((centers - design @ solution) * roots))),
        degrees=max(0.0, float(np.sum(roots**2)) - design.shape[1]),
        undisturbed=min(int(np.sum(roots[sides == side] == 1)) for side in (0, 1)),
    )


def spread_of_repeats(
    repeats: Sequence[Sequence[float]], expected: float, squares: float = 0.0, degrees: float = 0.0
) -> tuple[float, float]:
    """By how much costs of one configuration differ, as a standard deviation, and how many degrees
    of freedom that rests on.

    Args:
        repeats: the costs of each configuration.
        expected: the variance that is guessed; it counts as ``PRIOR_BLOCKS`` costs.
        squares, degrees: what a fit of others left over, and of how many.
    """
    for group in repeats:
        spread = [cost - group[0] for cost in group]
        squares += sum((offset - fmean(spread)) ** 2 for offset in spread)
        degrees += len(group) - 1
    degrees += PRIOR_BLOCKS
    return math.sqrt((squares + PRIOR_BLOCKS * expected) / degrees), degrees


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


def _precision(block: Estimate, inside: float) -> float:
    """1, or for a block that was disturbed the typical standard error over its own.

    Spreads of few costs differ by chance, so that only one that is far too large tells.
    """
    error = block.standard_error
    if inside == 0 or not math.isfinite(error) or error <= DISTURBED * inside:
        return 1.0
    return inside / error


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

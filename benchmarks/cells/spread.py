"""Medians of blocks of steps, with their spread, and ratios in pairs of blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from harness import RESAMPLES, Comparison, compare

Blocks = Sequence[Sequence[float]]
"""Step times in seconds, by round: all of a round ran right after each other."""


@dataclass(frozen=True)
class Spread:
    """The step times of an arm.

    Attributes:
        seconds: median over all steps.
        deviation_seconds: median absolute deviation from it.
        low, high: 95 % percentile bootstrap interval of the median, over whole blocks, as steps
            of a block are alike (Efron and Tibshirani, An Introduction to the Bootstrap,
            chapter 13).
    """

    seconds: float
    deviation_seconds: float
    low: float
    high: float
    steps: int


def spread(blocks: Blocks) -> Spread:
    """Raises ValueError where there is no step."""
    steps = [seconds for block in blocks for seconds in block]
    if not steps:
        raise ValueError("an arm without a measured step")
    middle = median(steps)
    draw = random.Random(0)
    medians = sorted(
        median([seconds for block in draw.choices(blocks, k=len(blocks)) for seconds in block])
        for _ in range(RESAMPLES)
    )
    return Spread(
        seconds=middle,
        deviation_seconds=median(abs(seconds - middle) for seconds in steps),
        low=medians[int(0.025 * RESAMPLES)],
        high=medians[int(0.975 * RESAMPLES) - 1],
        steps=len(steps),
    )


def ratio(reference: Blocks, other: Blocks) -> Comparison:
    """``other`` over ``reference``, both in blocks of the same rounds."""
    return compare([median(block) for block in reference], [median(block) for block in other])

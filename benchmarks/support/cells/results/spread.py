"""Medians of blocks of steps, with their spread, and ratios in pairs of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks.support.harness import RESAMPLES, Comparison, compare

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
    """As many steps in every block.

    Raises:
        ValueError: no step, or blocks of different lengths.
    """
    steps = np.asarray(blocks, dtype=float)
    if steps.ndim != 2 or not steps.size:
        raise ValueError("an arm without a measured step")
    middle = float(np.median(steps))
    draws = np.random.default_rng(0).integers(len(steps), size=(RESAMPLES, len(steps)))
    medians = np.median(steps[draws].reshape(RESAMPLES, -1), axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return Spread(
        seconds=middle,
        deviation_seconds=float(np.median(np.abs(steps - middle))),
        low=float(low),
        high=float(high),
        steps=steps.size,
    )


def ratio(reference: Blocks, other: Blocks) -> Comparison:
    """``other`` over ``reference``, both in blocks of the same rounds."""
    return compare([median(block) for block in reference], [median(block) for block in other])

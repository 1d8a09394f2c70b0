"""Robust least squares: residuals that share a fault cannot dominate."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
# Standard deviations of a normal distribution in its median absolute deviation.
DEVIATIONS = 1.4826


def bounded(residuals: Floats) -> Floats:
    """The residuals of one trial, scaled so that their sum of squares becomes log(1 + it).

    This is Cauchy's loss of all of them together: the further off a disturbed trial is, the less it
    pulls.
    """
    squares = float(residuals @ residuals)
    if squares < 1e-12:
        return residuals
    shortened: Floats = residuals * math.sqrt(math.log1p(squares) / squares)
    return shortened


def softened(residuals: Floats) -> Floats:
    """Each residual scaled so that its square grows only linearly above 1 (soft L1)."""
    found: Floats = np.sign(residuals) * np.sqrt(2 * (np.sqrt(1 + residuals**2) - 1))
    return found


def scatter(values: Floats) -> float:
    """Standard deviation without outliers, from the median absolute deviation."""
    return DEVIATIONS * float(np.median(np.abs(values - np.median(values))))

"""Least squares in which what shares a fault cannot decide alone."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
# Standard deviations of a normal distribution in its median absolute deviation.
DEVIATIONS = 1.4826


def bounded(residuals: Floats) -> Floats:
    """Those of one trial, shortened so that their sum of squares becomes its logarithm.

    Cauchy's loss, log(1 + sum of squares), of all of them together: a trial that was disturbed as a
    whole pulls the less the further it is off.
    """
    squares = float(residuals @ residuals)
    if squares < 1e-12:
        return residuals
    shortened: Floats = residuals * math.sqrt(math.log1p(squares) / squares)
    return shortened


def softened(residuals: Floats) -> Floats:
    """Each by itself, so that its square grows linearly only where it is above 1 (soft L1)."""
    found: Floats = np.sign(residuals) * np.sqrt(2 * (np.sqrt(1 + residuals**2) - 1))
    return found


def scatter(values: Floats) -> float:
    """Standard deviation of all but a few outliers, from the median absolute deviation."""
    return DEVIATIONS * float(np.median(np.abs(values - np.median(values))))

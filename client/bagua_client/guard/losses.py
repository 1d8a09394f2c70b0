"""The losses of some steps as they travel between the ranks, and what of a loss is harm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

MARGIN = 0.05
"""The part of the usual loss by which another may exceed it; more is harm."""
DEVIATIONS = 3.0
"""The standard errors that are allowed besides: a loss differs from batch to batch."""
LARGEST = 1e100
"""Of a loss; a larger one counts as not finite, since its square may be."""


class Losses(NamedTuple):
    """The losses of some steps, of any ranks.

    Attributes:
        steps: how many of them were finite.
        total, squares: the sums of those and of their squares.
        lost: how many were not finite.
    """

    steps: int = 0
    total: float = 0.0
    squares: float = 0.0
    lost: int = 0

    @classmethod
    def of(cls, values: Sequence[float]) -> Losses:
        """The losses of one rank, a value for each step."""
        known = [value for value in values if abs(value) <= LARGEST]  # NaN is not
        squares = sum(value * value for value in known)
        return cls(len(known), sum(known), squares, len(values) - len(known))

    @classmethod
    def sum(cls, parts: Iterable[Losses]) -> Losses:
        """Add up the losses of all parts."""
        return cls(*map(sum, zip(cls(), *parts, strict=True)))

    @property
    def told(self) -> int:
        """How many there were."""
        return self.steps + self.lost

    @property
    def mean(self) -> float:
        """Of the finite ones; NaN: there is none."""
        return self.total / self.steps if self.steps else math.nan

    @property
    def variance(self) -> float:
        """The variance of one loss."""
        return max(self.squares / self.steps - self.mean**2, 0.0)

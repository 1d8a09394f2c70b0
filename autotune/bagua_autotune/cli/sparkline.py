"""A series of numbers in one line of block characters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw the values in at most ``width`` characters; each shows the median of its share of the
    values.
    """
    shares = condense(values, width)
    low, high = min(shares, default=0.0), max(shares, default=0.0)
    if high <= low:
        return BLOCKS[0] * len(shares)
    steps = (len(BLOCKS) - 1) / (high - low)
    return "".join(BLOCKS[round((value - low) * steps)] for value in shares)


def condense(values: Sequence[float], width: int) -> list[float]:
    """The values, or the medians of ``width`` shares of nearly equal length."""
    count = min(len(values), width)
    ends = [place * len(values) // count for place in range(count + 1)] if count > 0 else []
    return [median(values[begin:end]) for begin, end in pairwise(ends)]

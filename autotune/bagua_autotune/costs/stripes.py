"""What more channels gain a sharded model, from the numbers of them that were profiled."""

from __future__ import annotations

import math
from collections.abc import Mapping

from bagua_autotune.costs.parameters import BEND

GAIN_PER_DOUBLING = 0.7
"""Part of the time that is left with twice as many channels, where one number of them is profiled,
up to ``USEFUL_CHANNELS``; with an error of ``DOUBLING_ERROR`` for each doubling, as a logarithm."""
USEFUL_CHANNELS = 4
STRIPE_LOSS = 0.3
"""Of the rate that another channel adds, for each one that there is already."""
DOUBLING_ERROR, SMALLEST_DOUBT = 0.3, 0.05


class Stripes:
    """Channels gain what is usual, and less where the link is nearly full: so two numbers of them
    tell the link's rate from one channel's.

    Args:
        seconds: that the same traffic takes, by the number of channels; at least one.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self._known = sorted(seconds)
        few, many = self._known[0], self._known[-1]
        # What the link adds to the time, to the power of BEND, where one channel alone takes 1.
        self._link: float | None = None
        if few != many:
            left = min(seconds[many] / seconds[few], 1 - 1e-3) ** BEND
            link = (_useful(many) ** -BEND - left * _useful(few) ** -BEND) / (left - 1)
            self._link = max(link, 0.0)

    def nearest(self, count: int) -> int:
        """The known number that is nearest."""
        return min(self._known, key=lambda known: (abs(math.log2(known / count)), known))

    def gain(self, count: int) -> tuple[float, float]:
        """The part of the nearest number's time that is left with so many channels, and how far
        off that may be, as a logarithm."""
        nearest = self.nearest(count)
        doubt = DOUBLING_ERROR * abs(math.log2(count / nearest))
        if self._link is None:
            useful = min(count, USEFUL_CHANNELS) / min(nearest, USEFUL_CHANNELS)
            return GAIN_PER_DOUBLING ** math.log2(useful), doubt
        slow, fast = (_useful(each) ** -BEND + self._link for each in (nearest, count))
        left = (fast / slow) ** (1 / BEND)
        # Where the link is full already, more channels change little.
        return left, min(doubt, abs(math.log(left)) + SMALLEST_DOUBT)


def _useful(count: int) -> float:
    """To how many channels that do not slow each other so many amount."""
    return (1 - (1 - STRIPE_LOSS) ** min(count, USEFUL_CHANNELS)) / STRIPE_LOSS

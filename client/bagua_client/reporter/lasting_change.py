"""Finds lasting changes of the step times after the tuning, from nothing but the step times.

It compares the medians of blocks of steps, so it ignores single slow steps, and disturbances
shorter than two blocks.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

BLOCK_STEPS = 16
REFERENCE_BLOCKS = 4
LASTING_BLOCKS = 3
SMALLEST_CHANGE = math.log(1.05)
"""A change below 5 % is not worth a tuning."""
ERRORS = 3.0
"""A change must be so many standard errors of what is compared."""


@dataclass(frozen=True)
class Drift:
    """Step times that have changed lastingly, in seconds."""

    before_seconds: float
    now_seconds: float


class DriftWatch:
    """Learns the usual step time from the first steps, and tells when it has changed.

    The spread of the log step times is estimated by their median absolute deviation; a median
    of n steps then has the standard error 1.2533 sigma / sqrt(n), the asymptotic one of normal
    errors (Kendall and Stuart, The Advanced Theory of Statistics, vol. 1, ch. 14). A block's
    median and the reference's both have one.

    Attributes:
        suspects: the latest block was unlike the reference, or a change was just told: news of
            further steps are wanted soon.
    """

    def __init__(self) -> None:
        self._next_step: int | None = None
        self.restart()

    def restart(self) -> None:
        """Restart: learn anew what is normal."""
        self.suspects = False
        self._gone: float | None = None
        self._block: list[float] = []
        self._learned: deque[list[float]] = deque(maxlen=REFERENCE_BLOCKS)
        self._reference: float | None = None
        self._limit = math.inf
        self._last: deque[float] = deque(maxlen=LASTING_BLOCKS)

    def add(self, step: int, seconds: float) -> Drift | None:
        """Take in the time of a step, its slowest rank's; the change, if it is lasting now.

        A change while it learns is told when it has learned, against the first block. After a
        later one, or where steps are missing, it learns anew.
        """
        if step != self._next_step:
            self.restart()
        self._next_step = step + 1
        self._block.append(math.log(max(seconds, 1e-9)))
        if len(self._block) < BLOCK_STEPS:
            return None
        block, self._block = self._block, []
        if self._reference is None:
            return self._learn(block)
        return self._compare(median(block) - self._reference)

    def _learn(self, block: list[float]) -> Drift | None:
        self.suspects = False
        if len(self._learned) == REFERENCE_BLOCKS and self._gone is None:
            self._gone = median(self._learned[0])
        self._learned.append(block)
        if len(self._learned) < REFERENCE_BLOCKS:
            return None
        medians = [median(block) for block in self._learned]
        deviations = [
            abs(value - middle)
            for block, middle in zip(self._learned, medians, strict=True)
            for value in block
        ]
        sigma = 1.4826 * median(deviations)
        error = 1.2533 * sigma * math.sqrt((1 + 1 / REFERENCE_BLOCKS) / BLOCK_STEPS)
        limit = max(SMALLEST_CHANGE, ERRORS * error)
        too_far = 2 * limit
        if max(medians) - min(medians) > too_far:
            return None  # It changed while it learned; the oldest block goes with the next.
        self._reference = median([value for block in self._learned for value in block])
        self._limit = limit
        if self._gone is None or abs(self._reference - self._gone) <= too_far:
            return None
        self.suspects = True
        return Drift(math.exp(self._gone), math.exp(self._reference))

    def _compare(self, change: float) -> Drift | None:
        assert self._reference is not None
        self.suspects = abs(change) > self._limit
        self._last.append(change)
        if len(self._last) < LASTING_BLOCKS:
            return None
        if min(self._last) <= self._limit and max(self._last) >= -self._limit:
            return None
        # The first of these blocks may hold steps from before the change.
        before, now = self._reference, self._reference + self._last[-1]
        self.restart()
        self.suspects = True
        return Drift(math.exp(before), math.exp(now))

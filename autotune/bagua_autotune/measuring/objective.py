"""What is minimised: how the ranks' values of one step become a cost, and costs a speed-up.

The search, the confirmation and the statistics see costs only, so a protocol that measures
something else is one small class here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import harmonic_mean
from typing import Protocol

from bagua_autotune.model.job import Api

# Beyond these the statistics' squares and exponentials would overflow.
LARGEST_LOG = 700.0
LARGEST_SPEED = 1e100


class Objective(Protocol):
    """Lower cost is better.

    The smallest example is an objective that takes the first rank's value as it is::

        class FirstRank:
            closes_itself = True
            def cost(self, values, apart=False): return values[0]
            def scale(self, baseline_cost): return abs(baseline_cost)
            def speedup(self, gain, baseline_cost): return 1 + gain / abs(baseline_cost)
            def seconds(self, cost): return None
    """

    closes_itself: bool
    """Whether observations close a trial (see trial_end), or the protocol does."""

    def cost(self, values: Sequence[float | None], apart: bool = False) -> float:
        """The cost of one step; ``values`` has one per rank, at least one not None.

        Args:
            apart: no rank waits for another in it.
        """

    def scale(self, baseline_cost: float) -> float:
        """The difference of costs that is a gain of 100 %; above 0."""

    def speedup(self, gain: float, baseline_cost: float) -> float:
        """Return how many times faster than the default a cost lower by ``gain`` is."""

    def seconds(self, cost: float) -> float | None:
        """The step time that the cost stands for, if it stands for one."""


class StepTime:
    """The logarithm of a step's seconds; the slowest rank decides a synchronous step. Of ranks that
    do not wait for one another, it is the seconds in which as many steps are made as there are
    ranks."""

    closes_itself = True

    def cost(self, values: Sequence[float | None], apart: bool = False) -> float:
        present = [value for value in values if value is not None]
        return math.log(harmonic_mean(present) if apart else max(present))

    def scale(self, baseline_cost: float) -> float:
        return 1.0  # d(log t) = dt / t

    def speedup(self, gain: float, baseline_cost: float) -> float:
        return _exponential(gain)

    def seconds(self, cost: float) -> float | None:
        return _exponential(cost)


class Speed:
    """Bagua's speed: any finite real number, higher is better; the ranks' mean counts."""

    closes_itself = False

    def cost(self, values: Sequence[float | None], apart: bool = False) -> float:
        present = [value for value in values if value is not None]
        mean = sum(value / len(present) for value in present)
        return -bounded(mean)

    def scale(self, baseline_cost: float) -> float:
        return max(abs(baseline_cost), 1e-12)

    def speedup(self, gain: float, baseline_cost: float) -> float:
        return 1.0 + gain / self.scale(baseline_cost)

    def seconds(self, cost: float) -> float | None:
        return None


class RunTime(StepTime):
    """The step time of a whole run, which is one trial."""

    closes_itself = False


class RunScore(RunTime):
    """A number that a run printed. Its cost is a logarithm, too, but stands for no time: only the
    search knows whether more is better, and stores the cost of each run beside its number."""

    def cost(self, values: Sequence[float | None], apart: bool = False) -> float:
        raise NotImplementedError("the cost of a run is stored with it")

    def seconds(self, cost: float) -> float | None:
        return None


def bounded(speed: float) -> float:
    """The speed within ±LARGEST_SPEED."""
    return max(-LARGEST_SPEED, min(speed, LARGEST_SPEED))


OBJECTIVES: dict[Api, Objective] = {
    "v1": Speed(),
    "v2": StepTime(),
    "runs": RunTime(),
    "scores": RunScore(),
}


def _exponential(logarithm: float) -> float:
    return math.exp(max(-LARGEST_LOG, min(logarithm, LARGEST_LOG)))

"""What is minimised, and trials compared by it with the default that was measured beside them.

The search, the confirmation and the statistics see costs only, so a protocol that measures
something else is one small class here.

A machine becomes slower or faster while a job is tuned, so that a trial says little against a
default of an hour before. What the default cost at a trial is read off the line between its own
measurements before and after; before the first and after the last, the nearest one counts.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot, isfinite
from statistics import harmonic_mean
from typing import Protocol

from bagua_autotune.model.job import Api, Trial
from bagua_autotune.model.statistics import Estimate, Interval, pooled
from bagua_wire.configuration import Configuration

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
    """Whether observations close a trial (see ``visits.measured``), or the protocol does."""

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


# Measurements of one configuration minutes apart differ by some percent on a machine that did not
# change. It did where more than this lies between the intervals of two of them.
CHANGE = 0.05


@dataclass(frozen=True)
class Comparison:
    """What a configuration cost, and what the default cost beside it."""

    default: Estimate
    measured: Estimate

    def speedup(self, objective: Objective) -> Interval:
        """How many times as fast as the default it was.

        The bounds are the widest that both intervals allow; infinite where one of the two was
        measured by a single value.
        """
        gains = (
            self.default.center - self.measured.center,
            self.default.low - self.measured.high,
            self.default.high - self.measured.low,
        )
        scale = self.default.center
        return Interval(*(objective.speedup(g, scale) if isfinite(g) else g for g in gains))


@dataclass(frozen=True)
class Change:
    """Two trials of the default, in their order, that a steady machine does not explain."""

    before: Trial
    after: Trial


class Defaults:
    """The default's measurements in one round.

    Args:
        configuration: the default.
        trials: of the round.
    """

    def __init__(self, configuration: Configuration, trials: Sequence[Trial]) -> None:
        self._trials = [t for t in trials if t.configuration == configuration and t.estimate]
        self._indices = [trial.index for trial in self._trials]

    @property
    def trial(self) -> Trial | None:
        """The configuration's first measured trial; None: it was not measured."""
        return self._trials[0] if self._trials else None

    @property
    def first(self) -> Estimate | None:
        """The configuration's first measurement; None: it was not measured."""
        return _estimate(self._trials[0]) if self._trials else None

    @property
    def pooled(self) -> Estimate | None:
        """All measurements of the configuration together; None: it was not measured."""
        return pooled([_estimate(trial) for trial in self._trials]) if self._trials else None

    def compare(self, trials: Sequence[Trial]) -> Comparison | None:
        """Trials of one configuration with the default beside each of them, pooled; None where one
        of the two was not measured."""
        own = [trial.estimate for trial in trials if trial.estimate]
        beside = [self.at(trial.index) for trial in trials if trial.estimate]
        # One that stands beside several trials is one measurement all the same.
        defaults = [estimate for estimate in dict.fromkeys(beside) if estimate is not None]
        return Comparison(pooled(defaults), pooled(own)) if defaults else None

    def change(self, objective: Objective) -> Change | None:
        """How the machine itself changed in the round; None: it did not, as far as is known."""
        by_cost = sorted(self._trials, key=lambda trial: _estimate(trial).center)
        if len(by_cost) < 2:
            return None
        fastest, slowest = by_cost[0], by_cost[-1]
        scale = objective.scale(_estimate(self._trials[0]).center)
        between = _estimate(slowest).low - _estimate(fastest).high
        if not between > CHANGE * scale:
            return None
        before, after = sorted((fastest, slowest), key=lambda trial: trial.index)
        return Change(before, after)

    def at(self, index: int) -> Estimate | None:
        """What the default cost when this trial was measured; None: it was not measured."""
        if not self._trials:
            return None
        place = bisect_left(self._indices, index)
        if place == len(self._indices):
            return _estimate(self._trials[-1])
        after = self._trials[place]
        if place == 0 or after.index == index:
            return _estimate(after)
        before = self._trials[place - 1]
        share = (index - before.index) / (after.index - before.index)
        return _between(_estimate(before), _estimate(after), share)


def _between(before: Estimate, after: Estimate, share: float) -> Estimate:
    """Interpolate on the line from one estimate to the other."""
    return Estimate(
        center=before.center + share * (after.center - before.center),
        standard_error=hypot((1 - share) * before.standard_error, share * after.standard_error),
        count=min(before.count, after.count),
    )


def _estimate(trial: Trial) -> Estimate:
    assert trial.estimate is not None  # only measured ones are kept
    return trial.estimate

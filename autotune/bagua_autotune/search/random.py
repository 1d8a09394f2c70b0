"""Random search: every candidate once, in a seeded order; a yardstick for other methods, and what a
job goes on with where another one fails."""

from __future__ import annotations

import math
import random
from statistics import fmean

from bagua_autotune.model.statistics import Interval, deviation_of_repeats
from bagua_autotune.search.searcher import Problem
from bagua_wire.configuration import Configuration

# A guess of what visits differ by, and so many standard errors of a difference are claimed.
USUAL_DEVIATION, CLAIMED_ERRORS = 0.03, 3.0


class RandomSearcher:
    """See Searcher and Judges."""

    def __init__(self, problem: Problem) -> None:
        baseline, *rest = problem.candidates
        random.Random(problem.seed).shuffle(rest)
        self._order = [baseline, *rest]
        self._costs: dict[Configuration, list[float]] = {}
        self.initial_trials = min(3, len(self._order))

    def tell(self, configuration: Configuration, cost: float, standard_error: float) -> None:
        if not math.isfinite(cost):
            raise ValueError(f"the cost of {configuration} is not finite")
        self._costs.setdefault(configuration, []).append(cost)

    def ask(self) -> Configuration:
        """The next candidate that is not measured; from the first on once all are."""
        return min(self._order, key=lambda candidate: len(self._costs.get(candidate, ())))

    def best(self) -> Configuration:
        measured = [candidate for candidate in self._order if candidate in self._costs]
        if not measured:
            raise LookupError("no candidate was measured")
        return min(measured, key=self.expected_cost)

    def expected_cost(self, configuration: Configuration) -> float:
        """The mean of its own costs; if it was not measured, that of all."""
        repeats = self._costs.get(configuration)
        return fmean(repeats or [cost for costs in self._costs.values() for cost in costs])

    def expected_gain(self) -> float:
        """The expected gain as if costs were drawn from a uniform distribution.

        The lowest of n draws lies range / (n + 1) above the bound on average, and n draws
        span (n - 1) / (n + 1) of the range; the difference of two successive n follows.
        """
        costs = [fmean(repeats) for repeats in self._costs.values()]
        count = len(costs)
        if count < 2:
            return math.inf
        return (max(costs) - min(costs)) / ((count - 1) * (count + 2))

    def gain(self, configuration: Configuration, default: Configuration) -> Interval:
        """See Judges: by the visits to the two alone, and what all visits differ by."""
        sides = [self._costs.get(side, []) for side in (configuration, default)]
        if configuration == default or not all(sides):
            return Interval(0.0, -math.inf, math.inf)
        mean = fmean(sides[1]) - fmean(sides[0])
        error = deviation_of_repeats(self._costs.values(), USUAL_DEVIATION)
        error *= math.sqrt(sum(1 / len(costs) for costs in sides))
        return Interval(mean, mean - CLAIMED_ERRORS * error, mean + CLAIMED_ERRORS * error)

"""Random search: every candidate once, in a seeded order; a yardstick for other methods."""

from __future__ import annotations

import math
import random
from statistics import fmean

from bagua_autotune.search.searcher import Problem
from bagua_wire.configuration import Configuration


class RandomSearcher:
    """See Searcher."""

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

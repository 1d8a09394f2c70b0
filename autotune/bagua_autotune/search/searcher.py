"""The protocol of a search method, and how methods are found by name: ours, and those of other
packages by their entry points; and random search, the simplest one."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from statistics import fmean
from typing import Protocol, runtime_checkable

from bagua_autotune.costs import Layouts, Predictor
from bagua_autotune.model.knobs import Space
from bagua_autotune.model.statistics import Interval, deviation_of_repeats
from bagua_wire.configuration import Configuration

logger = logging.getLogger(__name__)

GROUP = "bagua_autotune.searchers"
"""Of the entry points that name a class each, or another factory."""
USUAL = "bayesian"
OURS = {
    USUAL: "bagua_autotune.search.bayesian:BayesianSearcher",
    "random": "bagua_autotune.search.searcher:RandomSearcher",
}


@dataclass(frozen=True)
class Problem:
    """Which of the candidates is the cheapest?

    Attributes:
        space: the knobs of every candidate.
        candidates: configurations that may be tried, the default first.
        seed: equal seeds and equal measurements give equal answers.
        predictor: the cost model; None if too little is known to have one.
        horizon_trials: how many trials' worth of steps the training is expected to go on. It says
            what a better configuration is worth, compared with the cost of a trial.
        layouts: of the tensors: gives the real average bucket of a candidate. None: its bucket
            size is used.
        without: the cost model without what was learned from a trial, by its index.
    """

    space: Space
    candidates: Sequence[Configuration]
    seed: int = 0
    predictor: Predictor | None = None
    horizon_trials: float = 50.0
    layouts: Layouts | None = None
    without: Callable[[int], Predictor | None] | None = None


class Searcher(Protocol):
    """Chooses what to try next, from the measurements.

    A searcher lives for one decision: it is built, told every measured trial in order, and
    asked. So it needs no storage.  Equal seeds and measurements give equal answers.

    The smallest example tries the candidates in order::

        class InOrder:
            def __init__(self, problem):
                self._candidates, self._costs = problem.candidates, {}
                self.initial_trials = len(problem.candidates)
            def tell(self, configuration, cost, standard_error):
                self._costs[configuration] = cost
            def ask(self):
                return next((c for c in self._candidates if c not in self._costs), self.best())
            def best(self):
                return min(self._costs, key=self._costs.__getitem__)
            def expected_cost(self, configuration):
                return self._costs.get(configuration, fmean(self._costs.values()))
            def expected_gain(self):
                return math.inf
    """

    @property
    def initial_trials(self) -> int:
        """The number of trials that are chosen before the search learns from any of them."""

    def tell(self, configuration: Configuration, cost: float, standard_error: float) -> None:
        """Learn a measured cost. ``standard_error`` is infinite where it is not known.

        Raises:
            ValueError: the cost is not finite.
        """

    def ask(self) -> Configuration:
        """The candidate to try next; the default first. Repeats are allowed."""

    def best(self) -> Configuration:
        """The measured candidate with the lowest expected cost, with the noise accounted for.

        Raises:
            LookupError: no candidate was measured.
        """

    def expected_cost(self, configuration: Configuration) -> float:
        """The expected cost of a candidate or measured configuration; needs one measurement."""

    def expected_gain(self) -> float:
        """How much the next trial is expected to lower the best cost, in units of cost."""


@runtime_checkable
class Predicts(Protocol):
    """A searcher that predicts every candidate's cost.

    The predictions are drawn as a curve; the search itself does not need them.
    """

    def predict(self, configurations: Sequence[Configuration]) -> list[Interval]:
        """The expected costs of candidates or measured configurations, with their 95 % band.

        An empty list if fewer than two costs were told, or there is a single candidate.
        """


@runtime_checkable
class Judges(Protocol):
    """A searcher that says itself whether its best is faster than the default; for others the usual
    searcher judges, by what they were told."""

    def gain(self, configuration: Configuration, default: Configuration) -> Interval:
        """The default's cost less a measured configuration's, with the interval that is claimed;
        unbounded before both are measured."""


Factory = Callable[[Problem], Searcher]


def _found() -> dict[str, EntryPoint]:
    """All methods by name, none of them imported. Ours go before others of the same name."""
    ours = [EntryPoint(name, value, GROUP) for name, value in OURS.items()]
    return {entry.name: entry for entry in (*entry_points(group=GROUP), *ours)}


def names() -> list[str]:
    return sorted(_found())


def make_searcher(name: str, problem: Problem) -> Searcher:
    """Build the search method of this name; the usual one where that cannot be imported.

    Raises:
        ValueError: there is none.
    """
    return _factory(name)(problem)


@cache
def _factory(name: str) -> Factory:
    entry = _found().get(name)
    if entry is None:
        raise ValueError(f"no search method {name!r}; there are {', '.join(names())}")
    try:
        found: Factory = entry.load()
    except Exception as error:
        if name == USUAL:
            raise
        logger.error(
            "the search method %s (%s) cannot be imported: %r; %s is used in its place",
            *(name, entry.value, error, USUAL),
        )
        return _factory(USUAL)
    return found


# A guess of what visits differ by, and so many standard errors of a difference are claimed.
USUAL_DEVIATION, CLAIMED_ERRORS = 0.03, 3.0


class RandomSearcher:
    """Random search: every candidate once, in a seeded order; a yardstick for other methods, and
    what a job goes on with where another one fails."""

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

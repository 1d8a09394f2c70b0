"""The protocol of a search method, and the registry in which methods are found by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from bagua_autotune.model.knobs import Configuration
from bagua_autotune.model.statistics import Interval
from bagua_autotune.search.problem import Problem


class Searcher(Protocol):
    """Chooses what to try next from what was measured.

    A searcher lives for one decision: it is built, told every search trial in order, and
    asked, so nothing of it needs storing.  Equal seeds and tells give equal answers.

    The smallest example tries the candidates in their order::

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
        """So many trials are chosen before the search learns from any of them."""

    def tell(self, configuration: Configuration, cost: float, standard_error: float) -> None:
        """Learn a measured cost. ``standard_error`` is infinite where it is not known.

        Raises:
            ValueError: the cost is not finite.
        """

    def ask(self) -> Configuration:
        """The candidate to try next; the baseline first. Repeats are allowed."""

    def best(self) -> Configuration:
        """The measured candidate of the lowest expected cost, the noise allowed for.

        Raises:
            LookupError: no candidate was measured.
        """

    def expected_cost(self, configuration: Configuration) -> float:
        """What a candidate, or a configuration that was told, costs; once anything was told."""

    def expected_gain(self) -> float:
        """By how much the next trial is expected to lower the best cost; in units of cost."""


@runtime_checkable
class Predicts(Protocol):
    """What a searcher has besides if it believes something of every candidate's cost.

    People are shown it as a curve; the search itself needs it not.
    """

    def predict(self, configurations: Sequence[Configuration]) -> list[Interval]:
        """What candidates, or configurations that were told, cost, with the 95 % band.

        Once two costs were told; before that, and of a single candidate, there is nothing: an
        empty list.
        """


Factory = Callable[[Problem], Searcher]

_factories: dict[str, Factory] = {}


def register(name: str) -> Callable[[Factory], Factory]:
    """Class decorator: makes a search method known by ``name``."""

    def add(factory: Factory) -> Factory:
        _factories[name] = factory
        return factory

    return add


def names() -> list[str]:
    return sorted(_factories)


def make_searcher(name: str, problem: Problem) -> Searcher:
    """Build the search method of this name.

    Raises:
        ValueError: there is none.
    """
    if name not in _factories:
        raise ValueError(f"no search method {name!r}; there are {', '.join(names())}")
    return _factories[name](problem)

"""The service's own search methods, driven as the service drives them.

A searcher is built anew for each decision, with the cost model fitted to all profiles, and told
every trial so far; all of that is part of the time that a decision takes.
"""

from __future__ import annotations

import math
from dataclasses import replace

from bagua_autotune.costs import Layouts, Predictor, fit_model
from bagua_autotune.costs.collectives import Kind
from bagua_autotune.model.knobs import Configuration
from bagua_autotune.search import Problem, Searcher, make_searcher
from bagua_autotune.search.candidates import enumerate_candidates
from benchmarks.support.searches.landscape import Landscape, Measurement


class OurEngine:
    """See Engine.

    Args:
        method: the name of a search method of the service.
        has_model: whether it searches on the cost model.
    """

    def __init__(
        self, method: str, landscape: Landscape, seed: int, has_model: bool = True
    ) -> None:
        self._method = method
        self._has_model = has_model
        tensors = list(landscape.tensors)
        candidates = enumerate_candidates(landscape.space, landscape.baseline, tensors)
        self._layouts = Layouts(tensors)
        self._problem = Problem(landscape.space, candidates, seed, layouts=self._layouts)
        self._kinds = list(dict.fromkeys(map(Kind.of, candidates)))
        self._told: list[tuple[Configuration, Measurement]] = []

    def ask(self) -> Configuration:
        return self._searcher().ask()

    def tell(self, configuration: Configuration, measurement: Measurement) -> None:
        self._told.append((configuration, measurement))

    def best(self) -> Configuration:
        return self._searcher().best()

    def _searcher(self) -> Searcher:
        predictor = self._predictor() if self._has_model else None
        searcher = make_searcher(self._method, replace(self._problem, predictor=predictor))
        for configuration, measurement in self._told:
            cost = math.log(measurement.seconds)
            searcher.tell(configuration, cost, measurement.standard_error)
        return searcher

    def _predictor(self) -> Predictor | None:
        profiled = [(configuration, told.profile) for configuration, told in self._told]
        return fit_model(self._layouts, self._kinds, profiled)

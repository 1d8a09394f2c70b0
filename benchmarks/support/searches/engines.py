"""Search engines under one interface, found by name: ours, and Optuna's with its own defaults."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning

from bagua_autotune.costs import Layouts, Predictor, fit_model
from bagua_autotune.costs.collectives import Kind
from bagua_autotune.model.knobs import LogInteger
from bagua_autotune.search import Problem, Searcher, make_searcher
from bagua_autotune.search.candidates import enumerate_candidates
from bagua_wire.configuration import Configuration
from benchmarks.support.searches.bagua_optimizer import BaguaEngine
from benchmarks.support.searches.landscape import (
    Landscape,
    Measurement,
    bytes_of,
    half_exponents,
    nearest_half_exponent,
)

SAMPLERS: dict[str, type[Any]] = {
    "gp": optuna.samplers.GPSampler,
    "tpe": optuna.samplers.TPESampler,
}


class OptunaEngine:
    """See Engine. A size is an integer, its exponent in half-powers of two; any other knob is
    categorical.

    Args:
        sampler: one of SAMPLERS.
    """

    def __init__(self, sampler: str, landscape: Landscape, seed: int) -> None:
        optuna.logging.set_verbosity(logging.WARNING)
        warnings.filterwarnings("ignore", category=ExperimentalWarning)
        self._sizes = {k for k, domain in landscape.space.items() if isinstance(domain, LogInteger)}
        self._distributions: dict[str, BaseDistribution] = {
            knob: IntDistribution(half_exponents(domain)[0], half_exponents(domain)[-1])
            if isinstance(domain, LogInteger)
            else CategoricalDistribution(domain.values)
            for knob, domain in landscape.space.items()
        }
        baseline = landscape.baseline
        self._study = optuna.create_study(sampler=SAMPLERS[sampler](seed=seed))
        self._study.enqueue_trial(
            {
                knob: nearest_half_exponent(baseline.number(knob))
                if knob in self._sizes
                else baseline[knob]
                for knob in baseline
            }
        )
        self._trial: optuna.Trial | None = None

    def ask(self) -> Configuration:
        self._trial = self._study.ask(self._distributions)
        return self._configuration(self._trial.params)

    def tell(self, configuration: Configuration, measurement: Measurement) -> None:
        assert self._trial is not None, "nothing was asked for"
        self._study.tell(self._trial, measurement.seconds)

    def best(self) -> Configuration:
        """Optuna's: the trial of the lowest measurement."""
        return self._configuration(self._study.best_params)

    def _configuration(self, parameters: Mapping[str, Any]) -> Configuration:
        return Configuration(
            {
                knob: bytes_of(value) if knob in self._sizes else value
                for knob, value in parameters.items()
            }
        )


class OurEngine:
    """See Engine. The service's own search methods, driven as the service drives them.

    A searcher is built anew for each decision, with the cost model fitted to all profiles, and told
    every trial so far; all of that is part of the time that a decision takes.

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


class Engine(Protocol):
    """Proposes configurations of a landscape's space and learns what they measured.

    Its first proposal is the baseline, or what comes nearest to it in its own parameters: that
    is how a job begins, whoever tunes it.
    """

    def ask(self) -> Configuration:
        """The configuration of the next trial."""

    def tell(self, configuration: Configuration, measurement: Measurement) -> None:
        """Learn what the configuration asked for last measured."""

    def best(self) -> Configuration:
        """The configuration that the job would be left at."""


Factory = Callable[[Landscape, int], Engine]
"""Makes an engine for a landscape with a seed."""

ENGINES: dict[str, Factory] = {
    "ours": partial(OurEngine, "bayesian"),
    "plain": partial(OurEngine, "bayesian", has_model=False),
    "random": partial(OurEngine, "random", has_model=False),
    "optuna-gp": partial(OptunaEngine, "gp"),
    "optuna-tpe": partial(OptunaEngine, "tpe"),
    "bagua": BaguaEngine,
}
PEERS = ("random", "optuna-gp", "optuna-tpe", "bagua")

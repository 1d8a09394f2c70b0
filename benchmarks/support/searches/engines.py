"""Search engines under one interface, found by name: ours, Optuna's with its own defaults, and
Bagua's own optimiser, ``bagua.service.BayesianOptimizer`` of its PyPI release 0.9.2.
"""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning

from bagua_autotune.costs import Layouts, Predictor, fit_model
from bagua_autotune.costs.collectives import Kind
from bagua_autotune.model.knobs import LogInteger
from bagua_autotune.search import Problem, Searcher, make_searcher
from bagua_autotune.search.candidates import enumerate_candidates
from bagua_wire.configuration import Configuration, Value
from benchmarks.support.searches.landscape import (
    GIB,
    Landscape,
    Measurement,
    half_exponents,
)
from tests.outside import BAGUA, PLACE


class BaguaEngine:
    """See Engine. The seed is not used: Bagua's optimiser has a fixed one.

    It runs in a process of its own. Parameters are declared in Bagua's way: a size is an integer
    exponent of two, a choice of two is a boolean, of more an integer. The sizes are those of the
    other engines, 64 KiB to 1 GiB; Bagua's own range, 1 KiB to 2 GiB, would only cost it more
    trials.
    """

    def __init__(self, landscape: Landscape, seed: int) -> None:
        self._baseline = landscape.baseline
        self._space = landscape.space
        self._gibibytes = sum(tensor.bytes for tensor in landscape.tensors) / GIB
        self._next: dict[str, int] | None = None
        self._best: tuple[float, Configuration] = (-math.inf, landscape.baseline)
        integers, booleans = {}, []
        for knob, domain in self._space.items():
            if isinstance(domain, LogInteger):
                integers[knob] = (round(math.log2(domain.low)), round(math.log2(domain.high)))
            elif len(domain.values) > 2:
                integers[knob] = (0, len(domain.values) - 1)
            else:
                booleans.append(knob)
        _ask_worker({"integers": integers, "booleans": booleans})

    def ask(self) -> Configuration:
        if self._next is None:
            return self._baseline
        return Configuration({knob: self._value(knob, n) for knob, n in self._next.items()})

    def tell(self, configuration: Configuration, measurement: Measurement) -> None:
        speed = self._gibibytes / measurement.seconds  # as Bagua's workers report it
        self._best = max(self._best, (speed, configuration), key=lambda pair: pair[0])
        told = {knob: self._number(configuration, knob) for knob in self._space}
        self._next = _ask_worker({"told": told, "score": speed})["asked"]

    def best(self) -> Configuration:
        """Bagua's: the trial of the highest score."""
        return self._best[1]

    def _number(self, configuration: Configuration, knob: str) -> int:
        domain = self._space[knob]
        if isinstance(domain, LogInteger):
            return int(math.log2(configuration.number(knob)))
        return next(n for n, value in enumerate(domain.values) if value == configuration[knob])

    def _value(self, knob: str, number: int) -> Value:
        domain = self._space[knob]
        return 2**number if isinstance(domain, LogInteger) else domain.values[number]


def find_bagua() -> None:
    """See whether Bagua's release is there.

    Raises:
        SystemExit: it is not.
    """
    if not (PLACE / BAGUA).exists():
        raise SystemExit(
            f"{BAGUA} is not there; python -m tests.outside brings it; --engines leaves Bagua out"
        )


@cache
def _worker() -> subprocess.Popen[str]:
    """One for this process; it ends when this one does, as its input is closed then."""
    variables = {
        **os.environ,
        "PYTHONPATH": str(PLACE / BAGUA),
        "PYTHONWARNINGS": "ignore",  # one line for each point it has tried before
    }
    worker = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("bagua_worker.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=variables,
        text=True,
    )
    return worker


def _ask_worker(request: dict[str, Any]) -> Any:
    worker = _worker()
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(json.dumps(request) + "\n")
    worker.stdin.flush()
    answer = worker.stdout.readline()
    if not answer:
        raise RuntimeError(f"Bagua's optimiser ended with exit code {worker.wait()}")
    return json.loads(answer)


SAMPLERS: dict[str, type[Any]] = {
    "gp": optuna.samplers.GPSampler,
    "tpe": optuna.samplers.TPESampler,
}


class OptunaEngine:
    """See Engine.

    Args:
        sampler: one of SAMPLERS.
    """

    def __init__(self, sampler: str, landscape: Landscape, seed: int) -> None:
        optuna.logging.set_verbosity(logging.WARNING)
        warnings.filterwarnings("ignore", category=ExperimentalWarning)
        self._landscape = landscape
        self._distributions: dict[str, BaseDistribution] = {
            knob: IntDistribution(half_exponents(domain)[0], half_exponents(domain)[-1])
            if isinstance(domain, LogInteger)
            else CategoricalDistribution(domain.values)
            for knob, domain in landscape.space.items()
        }
        self._study = optuna.create_study(sampler=SAMPLERS[sampler](seed=seed))
        self._study.enqueue_trial(landscape.parameters(landscape.baseline))
        self._trial: optuna.Trial | None = None

    def ask(self) -> Configuration:
        self._trial = self._study.ask(self._distributions)
        return self._landscape.configuration(self._trial.params)

    def tell(self, configuration: Configuration, measurement: Measurement) -> None:
        assert self._trial is not None, "nothing was asked for"
        self._study.tell(self._trial, measurement.seconds)

    def best(self) -> Configuration:
        """Optuna's: the trial of the lowest measurement."""
        return self._landscape.configuration(self._study.best_params)


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

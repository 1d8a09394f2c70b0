"""Other searches on the same job in the same weather, with as many steps as ours took.

Each visits one configuration after the other, of which it learns the median of a few steps, and
leaves the job at what it takes for the best by its own rule. A switch costs it what it costs ours.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import skopt
import skopt.space

from bagua_autotune.model.knobs import SPACE, Categorical, LogInteger
from bagua_autotune.model.statistics import estimate
from bagua_autotune.search.candidates import enumerate_candidates
from bagua_client.agent.report import DROPPED_STEPS
from bagua_simulator import Simulator
from bagua_wire.configuration import Configuration
from benchmarks.support.noise.weather import Climate, Weather
from benchmarks.support.searches.engines import ENGINES, Engine
from benchmarks.support.searches.landscape import (
    Landscape,
    Measurement,
    half_exponents,
)
from tests.autotune.simulated_job import KNOBS, SWITCH_STEPS

SWITCH_COSTS_STEPS = SWITCH_STEPS + DROPPED_STEPS
VISIT_STEPS = 5
# Of successive halving: fewest steps of a visit, and most configurations at the start.
FEWEST_STEPS, MOST_ARMS = 3, 16
# As Bagua has it: as many points before the first fit, of a search of many more.
INITIAL_POINTS = 5


class Road:
    """A job's steps in its weather, of which so many are there to be spent."""

    def __init__(self, simulator: Simulator, climate: Climate, seed: int, steps: int) -> None:
        self.simulator = simulator
        self.steps = steps
        self._weather = Weather(climate, seed)
        self._step = 0

    def has(self, steps: int) -> bool:
        """Whether a visit of so many steps can still be paid."""
        return self._step + SWITCH_COSTS_STEPS + steps <= self.steps

    def visit(self, configuration: Configuration, steps: int) -> float:
        """The mean of so many steps, in seconds, without accidents: as ours measures."""
        self._weather.new_visit()
        self._step += SWITCH_COSTS_STEPS
        factors = []
        for _ in range(steps):
            self._step += 1
            factors.append(self._weather.factor(self._step, configuration.number("channels")))
        return estimate(factors).center * self.simulator.step_seconds(configuration)


Rival = Callable[[Road, int], Configuration]
"""Searches until the road has no more steps, with a seed; where it leaves the job."""


def halving(road: Road, seed: int) -> Configuration:
    """Successive halving (Jamieson and Talwalkar 2016) over the default and candidates by chance:
    equal steps for each rung, of which the faster half goes on to the next."""
    landscape = _landscape(road.simulator)
    others = list(enumerate_candidates(landscape.space, landscape.baseline, landscape.tensors))[1:]
    np.random.default_rng((seed, 9)).shuffle(others)
    arms = [landscape.baseline, *others][:MOST_ARMS]
    while len(arms) > 1 and _rung_steps(road.steps, len(arms)) < FEWEST_STEPS * len(arms):
        arms.pop()
    rung_steps = _rung_steps(road.steps, len(arms))
    while len(arms) > 1 and road.has(rung_steps // len(arms)):
        seconds = {arm: road.visit(arm, rung_steps // len(arms)) for arm in arms}
        arms = sorted(arms, key=seconds.__getitem__)[: len(arms) // 2]
    return arms[0]


def _rung_steps(steps: int, arms: int) -> int:
    """What is left for each rung when all switches are paid."""
    rungs = max(1, int(math.log2(arms)))
    visits = sum(arms >> rung for rung in range(rungs))
    return (steps - visits * SWITCH_COSTS_STEPS) // rungs


class SkoptEngine:
    """See Engine: a Gaussian process with expected improvement, as scikit-optimize ships it. The
    default is the first point, then come Halton points."""

    def __init__(self, landscape: Landscape, seed: int) -> None:
        warnings.filterwarnings("ignore", module="skopt")
        self._landscape = landscape
        self._optimizer = skopt.Optimizer(
            [
                skopt.space.Integer(half_exponents(domain)[0], half_exponents(domain)[-1])
                if isinstance(domain, LogInteger)
                else skopt.space.Categorical(domain.values)
                for domain in landscape.space.values()
            ],
            base_estimator="GP",
            acq_func="EI",
            n_initial_points=INITIAL_POINTS,
            initial_point_generator="halton",
            random_state=seed,
        )
        self._best: tuple[float, Configuration] | None = None

    def ask(self) -> Configuration:
        if self._best is None:
            return self._landscape.baseline
        values = zip(self._landscape.space, self._optimizer.ask(), strict=True)
        return self._landscape.configuration(dict(values))

    def tell(self, configuration: Configuration, measurement: Measurement) -> None:
        point = [*self._landscape.parameters(configuration).values()]
        self._optimizer.tell(point, measurement.seconds)
        if self._best is None or measurement.seconds < self._best[0]:
            self._best = measurement.seconds, configuration

    def best(self) -> Configuration:
        """The trial of the lowest measurement."""
        return self._best[1] if self._best else self._landscape.baseline


def by_engine(make: Callable[[Landscape, int], Engine], road: Road, seed: int) -> Configuration:
    """One of the search benchmark's engines, a trial being a visit of 5 steps."""
    landscape = _landscape(road.simulator)
    engine = make(landscape, seed)
    # Engines that want a standard error or a profile are none of these.
    profile = road.simulator.profile(landscape.baseline)
    while road.has(VISIT_STEPS):
        configuration = engine.ask()
        seconds = road.visit(configuration, VISIT_STEPS)
        engine.tell(configuration, Measurement(seconds, math.inf, profile))
    return engine.best() if road.steps >= SWITCH_COSTS_STEPS + VISIT_STEPS else landscape.baseline


@cache
def _landscape(simulator: Simulator) -> Landscape:
    domains = SPACE.validate_python({knob: simulator.space[knob] for knob in KNOBS})
    chosen = {
        knob: domain
        for knob, domain in domains.items()
        if isinstance(domain, LogInteger)
        or (isinstance(domain, Categorical) and len(domain.values) > 1)
    }
    return Landscape("", simulator, chosen)


RIVALS: dict[str, Rival] = {
    "halving": halving,
    "gp-ei": partial(by_engine, SkoptEngine),
    **{name: partial(by_engine, ENGINES[name]) for name in ("optuna-tpe", "optuna-gp", "bagua")},
}

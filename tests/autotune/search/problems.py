"""Simulated jobs as search problems, and cost models of any quality."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from bagua_autotune.search import Problem, Searcher
from bagua_autotune.search.candidates import enumerate_candidates
from bagua_simulator import Simulator
from bagua_simulator.workloads import cases
from bagua_wire.configuration import Configuration
from tests.autotune.simulated_job import space_of

KNOBS = ("bucket_bytes", "hierarchical", "channels")


@dataclass
class Table:
    """A cost model that says of each candidate what is written down, and 0 of others."""

    log_seconds: dict[Configuration, float] = field(default_factory=dict)
    misfit: float = 0.0

    def deviations(self, configurations: Sequence[Configuration]) -> NDArray[np.float64]:
        """It is sure."""
        return np.zeros((0, len(configurations)))

    def predict(self, configurations: Sequence[Configuration]) -> NDArray[np.float64]:
        return np.array([self.log_seconds.get(c, 0.0) for c in configurations])


@dataclass(frozen=True)
class Simulated:
    """A job's candidates and what each costs, in log seconds."""

    problem: Problem
    costs: dict[Configuration, float]

    @property
    def best(self) -> Configuration:
        return min(self.costs, key=self.costs.__getitem__)

    def loss(self, configuration: Configuration) -> float:
        """By how much it is slower than the best."""
        return math.expm1(self.costs[configuration] - self.costs[self.best])

    def guided_by(self, change: Callable[[float], float], seed: int = 0) -> Problem:
        """With a cost model that knows all costs, changed in this way."""
        predictor = Table({c: change(cost) for c, cost in self.costs.items()})
        return Problem(self.problem.space, self.problem.candidates, seed, predictor)


@cache
def simulated(name: str = "bert-large-100Gbit-16", knobs: tuple[str, ...] = KNOBS) -> Simulated:
    (simulator,) = [case.simulator for case in cases() if case.name == name]
    space = space_of(simulator, knobs)
    default = Configuration({knob: simulator.default[knob] for knob in knobs})
    candidates = enumerate_candidates(space, default, simulator.workload.tensors)
    costs = {c: math.log(simulator.step_seconds(_full(simulator, c))) for c in candidates}
    return Simulated(Problem(space, candidates), costs)


def _full(simulator: Simulator, configuration: Configuration) -> Configuration:
    return Configuration({**simulator.default, **configuration})


def drive(
    searcher: Searcher, job: Simulated, trials: int, noise: float = 0.01, seed: int = 0
) -> list[Configuration]:
    """Trials of what the searcher asks for; returns what those were."""
    rng = random.Random(seed)
    asked = []
    for _ in range(trials):
        asked.append(searcher.ask())
        searcher.tell(asked[-1], job.costs[asked[-1]] + rng.gauss(0, noise), noise)
    return asked

"""Search engines under one interface, found by name: one module for each family."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from bagua_autotune.model.knobs import Configuration
from benchmarks.support.searches.bagua_optimizer import BaguaEngine
from benchmarks.support.searches.landscape import Landscape, Measurement
from benchmarks.support.searches.optuna_samplers import OptunaEngine
from benchmarks.support.searches.ours import OurEngine


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

"""Optuna's Gaussian process and tree-structured Parzen estimator, with its own defaults.

A size is an integer, its exponent in half-powers of two; any other knob is categorical.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning

from bagua_autotune.model.knobs import Configuration, LogInteger
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
    """See Engine. ``sampler`` is one of SAMPLERS."""

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

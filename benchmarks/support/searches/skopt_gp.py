"""scikit-optimize's Gaussian process with expected improvement, as it ships: Halton points first.

A size is an integer, its exponent in half-powers of two; any other knob is categorical.
"""

from __future__ import annotations

import warnings
from typing import Any

from skopt import Optimizer
from skopt.space import Categorical, Integer

from bagua_autotune.model.knobs import Configuration, LogInteger
from benchmarks.support.searches.landscape import (
    Landscape,
    Measurement,
    bytes_of,
    half_exponents,
    nearest_half_exponent,
)

# As Bagua has it: as many points before the first fit, of a search of many more.
INITIAL_POINTS = 5


class SkoptEngine:
    """See Engine. The default is the first point."""

    def __init__(self, landscape: Landscape, seed: int) -> None:
        warnings.filterwarnings("ignore", module="skopt")
        self._sizes = {k for k, domain in landscape.space.items() if isinstance(domain, LogInteger)}
        self._knobs = tuple(landscape.space)
        self._optimizer = Optimizer(
            [
                Integer(half_exponents(domain)[0], half_exponents(domain)[-1])
                if isinstance(domain, LogInteger)
                else Categorical(domain.values)
                for domain in landscape.space.values()
            ],
            base_estimator="GP",
            acq_func="EI",
            n_initial_points=INITIAL_POINTS,
            initial_point_generator="halton",
            random_state=seed,
        )
        self._baseline = landscape.baseline
        self._best: tuple[float, Configuration] | None = None

    def ask(self) -> Configuration:
        if self._best is None:
            return self._baseline
        values = zip(self._knobs, self._optimizer.ask(), strict=True)
        return Configuration(
            {k: bytes_of(int(v)) if k in self._sizes else _plain(v) for k, v in values}
        )

    def tell(self, configuration: Configuration, measurement: Measurement) -> None:
        point = [
            nearest_half_exponent(configuration.number(knob))
            if knob in self._sizes
            else configuration[knob]
            for knob in self._knobs
        ]
        self._optimizer.tell(point, measurement.seconds)
        if self._best is None or measurement.seconds < self._best[0]:
            self._best = measurement.seconds, configuration

    def best(self) -> Configuration:
        """The trial of the lowest measurement."""
        return self._best[1] if self._best else self._baseline


def _plain(value: Any) -> int | str:
    """A level of a knob, as Python's own type: scikit-optimize answers with numpy's."""
    return str(value) if isinstance(value, str) else int(value)

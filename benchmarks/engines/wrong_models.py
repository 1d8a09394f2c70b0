"""Cost models made wrong on purpose: what they say must never cost the search much."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bagua_autotune.costs import Cost, CostModel, Layouts, Predictor
from bagua_autotune.model.knobs import Configuration

Distortion = Callable[[CostModel, Layouts, int], Predictor]
"""Makes a fitted model wrong, the same way in every decision of a search; the last is a seed."""


def costs_off(sigma: float, model: CostModel, layouts: Layouts, seed: int) -> Predictor:
    """Every kind's latency and time per byte are off by a lognormal factor of their own."""
    generator = np.random.default_rng(seed)
    wrong = {
        kind: Cost(
            latency_seconds=cost.latency_seconds * generator.lognormal(0.0, sigma),
            seconds_per_byte=cost.seconds_per_byte * generator.lognormal(0.0, sigma),
        )
        for kind, cost in model.costs.items()
    }
    ready_seconds = model.ready_seconds.tolist()
    return CostModel(layouts, ready_seconds, wrong, misfit=model.misfit)


class Inverted:
    """What the model calls the fastest this one calls the slowest, and so on."""

    def __init__(self, model: CostModel, layouts: Layouts, seed: int) -> None:
        self._model = model
        self.misfit = model.misfit

    def predict(self, configurations: Sequence[Configuration]) -> NDArray[np.float64]:
        """See Predictor."""
        return -self._model.predict(configurations)

    def deviations(self, configurations: Sequence[Configuration]) -> NDArray[np.float64]:
        """See Predictor."""
        return self._model.deviations(configurations)


DISTORTIONS: dict[str, Distortion] = {
    "costs off by 0.6": partial(costs_off, 0.6),
    "costs off by 1.0": partial(costs_off, 1.0),
    "ranking inverted": Inverted,
}

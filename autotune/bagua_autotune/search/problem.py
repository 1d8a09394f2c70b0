"""What a search method is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bagua_autotune.costs import Layouts, Predictor
from bagua_autotune.model.knobs import Configuration, Space


@dataclass(frozen=True)
class Problem:
    """Which of the candidates is the cheapest?

    Attributes:
        space: the knobs of every candidate.
        candidates: what may be tried, the baseline first.
        seed: equal seeds and tells give equal answers.
        predictor: the cost model; None if too little is known to have one.
        horizon_trials: as many steps as so many trials are expected to follow: what a better
            configuration is worth, compared with what trying one costs.
        layouts: of the tensors: says how finely a candidate really cuts them. None: its bucket
            size is taken at its word.
    """

    space: Space
    candidates: Sequence[Configuration]
    seed: int = 0
    predictor: Predictor | None = None
    horizon_trials: float = 50.0
    layouts: Layouts | None = None

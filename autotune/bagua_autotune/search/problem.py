"""The problem that a search method solves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bagua_autotune.costs import Layouts, Predictor
from bagua_autotune.model.knobs import Space
from bagua_wire.configuration import Configuration


@dataclass(frozen=True)
class Problem:
    """Which of the candidates is the cheapest?

    Attributes:
        space: the knobs of every candidate.
        candidates: configurations that may be tried, the default first.
        seed: equal seeds and equal measurements give equal answers.
        predictor: the cost model; None if too little is known to have one.
        horizon_trials: how many trials' worth of steps the training is expected to go on. It says
            what a better configuration is worth, compared with the cost of a trial.
        layouts: of the tensors: gives the real average bucket of a candidate. None: its bucket
            size is used.
        without: the cost model without what was learned from a trial, by its index.
    """

    space: Space
    candidates: Sequence[Configuration]
    seed: int = 0
    predictor: Predictor | None = None
    horizon_trials: float = 50.0
    layouts: Layouts | None = None
    without: Callable[[int], Predictor | None] | None = None

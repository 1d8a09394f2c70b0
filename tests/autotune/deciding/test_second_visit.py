"""What one visit denies is visited again, if the model promised it without that visit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bagua_autotune.deciding.second_visit import denied_once
from bagua_autotune.measuring.visits import Visits
from bagua_autotune.model.job import Trial
from bagua_autotune.model.knobs import Categorical
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.search import Problem
from bagua_wire.configuration import Configuration

CHANNELS = (1, 2, 4, 8)
CANDIDATES = [Configuration(channels=channels) for channels in CHANNELS]
SPACE = {"channels": Categorical(values=CHANNELS)}


class Model:
    """Promises a gain by each doubling of the channels."""

    misfit = 0.02

    def __init__(self, gain: float) -> None:
        self._gain = gain

    def predict(self, configurations: Sequence[Configuration]) -> NDArray[np.float64]:
        doublings = [math.log2(c.number("channels")) for c in configurations]
        return -self._gain * np.array(doublings)

    def deviations(self, configurations: Sequence[Configuration]) -> NDArray[np.float64]:
        return np.zeros((0, len(configurations)))


def asked(gain: float, *costs: tuple[int, float]) -> Configuration | None:
    """What is visited again after these visits, of channels and cost."""
    trials = [
        Trial(
            index, "search", Configuration(channels=channels), "measured", Estimate(cost, 0.01, 6)
        )
        for index, (channels, cost) in enumerate(costs)
    ]
    problem = Problem(SPACE, CANDIDATES, without=lambda _index: Model(gain))
    return denied_once(Visits(trials), problem, min(cost for _, cost in costs))


def test_a_level_that_is_promised_and_denied_once_is_visited_again() -> None:
    assert asked(0.2, (1, 0.0), (2, -0.2), (8, 0.1)) == Configuration(channels=8)


def test_a_level_that_is_denied_twice_is_given_up() -> None:
    assert asked(0.2, (1, 0.0), (2, -0.2), (8, 0.1), (8, 0.1)) is None


def test_a_level_that_nothing_promises_is_given_up() -> None:
    assert asked(-0.2, (1, 0.0), (2, 0.2), (8, 0.6)) is None


def test_a_level_that_is_a_little_slower_than_promised_is_believed() -> None:
    assert asked(0.2, (1, 0.0), (2, -0.2), (8, -0.5)) is None


def test_without_a_model_nothing_is_visited_again() -> None:
    trial = Trial(0, "search", CANDIDATES[3], "measured", Estimate(1.0, 0.01, 6))
    assert denied_once(Visits([trial]), Problem(SPACE, CANDIDATES), 0.0) is None

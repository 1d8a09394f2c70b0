"""Other searches with as many steps as our tunings."""

from __future__ import annotations

from typing import Any

import pytest

from bagua_simulator import Simulator
from benchmarks.support.noise.cases import cases
from benchmarks.support.noise.figures import of_searches
from benchmarks.support.noise.rivals import RIVALS, SWITCH_COSTS_STEPS, Road
from benchmarks.support.noise.tunings import Setting, tune
from benchmarks.support.noise.weather import CLIMATES, Climate

pytestmark = pytest.mark.slow

STEPS = 120


class Watched(Road):
    """Counts what was spent."""

    def __init__(self, simulator: Simulator, steps: int) -> None:
        super().__init__(simulator, Climate("", inside=0.0), 1, steps)
        self.spent = 0
        self.seconds: list[float] = []

    def visit(self, configuration: Any, steps: int) -> float:
        self.spent += SWITCH_COSTS_STEPS + steps
        self.seconds.append(super().visit(configuration, steps))
        return self.seconds[-1]


# Without nodes of several ranks, and with.
@pytest.mark.parametrize(("name", "place"), [("halving", 0), ("gp-ei", 4), ("optuna-tpe", 0)])
def test_a_rival_keeps_the_best_that_it_saw_and_spends_no_more(name: str, place: int) -> None:
    simulator = cases()[place].simulator
    road = Watched(simulator, STEPS)
    kept = RIVALS[name](road, 1)
    assert STEPS / 2 < road.spent <= STEPS
    assert simulator.step_seconds(kept) <= 1.001 * min(road.seconds)


def test_rivals_stand_beside_ours_in_the_table() -> None:
    row = tune(Setting(0, CLIMATES[0], 0, rivals=("halving",)))
    found = of_searches([row], [row])
    assert list(found) == ["ours", "ours, beside", "halving"]
    assert found["ours"] == found["ours, beside"]

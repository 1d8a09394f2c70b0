"""What is compared with our tunings: other searches with as many steps, another checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bagua_simulator import Simulator
from benchmarks.support.noise import beside
from benchmarks.support.noise.figures import difference, of_searches
from benchmarks.support.noise.rivals import RIVALS, SWITCH_COSTS_STEPS, VISIT_STEPS, Road
from benchmarks.support.noise.tunings import Setting, tune
from benchmarks.support.noise.unseen import cases
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


@pytest.mark.parametrize("name", ["halving", "gp-ei", "optuna-tpe"])
@pytest.mark.parametrize("place", [0, 4])  # without nodes of several ranks, and with
def test_a_rival_keeps_the_best_that_it_saw_and_spends_no_more(name: str, place: int) -> None:
    simulator = cases()[place].simulator
    road = Watched(simulator, STEPS)
    kept = RIVALS[name](road, 1)
    assert STEPS / 2 < road.spent <= STEPS
    assert simulator.step_seconds(kept) <= 1.001 * min(road.seconds)


@pytest.mark.parametrize("name", ["halving", "gp-ei", "optuna-tpe"])
def test_a_rival_without_steps_keeps_the_default(name: str) -> None:
    simulator = cases()[0].simulator
    road = Watched(simulator, SWITCH_COSTS_STEPS + VISIT_STEPS - 1)
    assert RIVALS[name](road, 1)["bucket_bytes"] == simulator.default["bucket_bytes"]
    assert road.spent == 0


def test_rivals_stand_beside_ours_in_the_table() -> None:
    row = tune(Setting(0, CLIMATES[0], 0, rivals=("halving",)))
    found = of_searches([row], [row])
    assert list(found) == ["ours", "ours, beside", "halving"]
    assert found["ours"] == found["ours, beside"]


def test_regret_is_against_the_best_of_what_either_side_knows() -> None:
    job = {"problem": "a", "seed": 1, "baseline_seconds": 3.0}
    mine = {**job, "kept_seconds": 2.2, "best_seconds": 2.0, "regret": 0.1, "steps": 80}
    theirs = {**job, "kept_seconds": 2.2, "best_seconds": 2.2, "regret": 0.0}
    for rows in beside.joined([mine], [theirs]):
        assert rows[0]["regret"] == pytest.approx(0.1)
    assert difference([mine, mine], [{**theirs, "steps": 90}] * 2).startswith(
        "regret +10.0 % (±0.0)"
    )
    with pytest.raises(ValueError, match="not the same job"):
        beside.joined([mine], [{**theirs, "baseline_seconds": 4.0}])


SCRIPT = """
import json, sys, bagua_autotune, bagua_simulator
from pathlib import Path
root = Path(bagua_autotune.__file__).parents[2]
rows = [bagua_simulator.__path__[0], *sys.argv[1:-2]]
Path(sys.argv[-1]).write_text(json.dumps({"service": str(root), "parts": {"noise": rows}}))
"""


def test_another_checkouts_service_runs_with_this_simulator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = tmp_path / "other"
    for package in ("bagua_autotune", "bagua_simulator"):
        (checkout / "autotune" / package).mkdir(parents=True)
        (checkout / "autotune" / package / "__init__.py").touch()
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.setattr(beside, "SCRIPT", tmp_path / "script.py")
    simulator, argument = beside.run(checkout, ["--draw=1"])["noise"]
    assert str(checkout) not in str(simulator)
    assert str(argument) == "--draw=1"
    with pytest.raises(RuntimeError, match="in place of"):
        # There is no service; Python finds the one that is installed.
        beside.run(tmp_path / "nothing", [])

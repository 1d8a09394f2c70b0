"""The benchmark of tunings under noise: its weather and its jobs, other searches with as many
steps, and the same tunings by the service of another checkout."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import pytest

from bagua_autotune.store import Store
from bagua_autotune.tuning.tuner import Tuner
from bagua_simulator import Simulator
from benchmarks import tuning
from benchmarks.support.noise import bad_moment, tunings
from benchmarks.support.noise.cases import cases, drawn_case
from benchmarks.support.noise.rivals import RIVALS, SWITCH_COSTS_STEPS, Road
from benchmarks.support.noise.tunings import Setting, tune
from benchmarks.support.noise.weather import (
    BAD_STEPS,
    BLOCK_STEPS,
    CLIMATES,
    GOOD_STEPS,
    Climate,
    Weather,
)
from tests.autotune.simulated_job import truth

pytestmark = pytest.mark.slow


def logs(climate: Climate, visits: int, steps: int) -> list[list[float]]:
    """Of the factors of steps, by visit."""
    weather = Weather(climate, seed=1)
    found = []
    for visit in range(visits):
        weather.new_visit()
        found.append([math.log(weather.factor(visit * steps + step)) for step in range(steps)])
    return found


def test_equal_seeds_give_equal_weather() -> None:
    for climate in CLIMATES:
        assert logs(climate, 2, 20) == logs(climate, 2, 20), climate.name


def test_visits_differ_by_what_the_climate_says() -> None:
    for by_visit in (0.0, 0.02, 0.1):
        centers = [median(visit) for visit in logs(Climate("", by_visit=by_visit), 400, 31)]
        assert stdev(centers) == pytest.approx(math.hypot(by_visit, 0.007), rel=0.2)


def test_steps_with_many_channels_are_fast_and_slow_by_turns_in_one_climate_alone() -> None:
    unsteady = [climate for climate in CLIMATES if climate.is_unsteady]
    assert [climate.name for climate in unsteady] == ["unsteady from 8 channels on"]
    for channels, expected in ((4, {1.0}), (8, {0.8, 1.3}), (16, {0.8, 1.3})):
        weather = Weather(replace(unsteady[0], inside=0.0), seed=1)
        steady = Weather(Climate("", inside=0.0), seed=1)
        factors = [
            weather.factor(step, channels) / steady.factor(step, channels) for step in range(4000)
        ]
        assert {round(each, 6) for each in factors} == expected
        assert fmean(factors) == pytest.approx(1.0, abs=0.02)


def calm(climate: Climate, steps: int) -> list[float]:
    """Factors of steps in which nobody is late, without noise inside a visit."""
    weather = Weather(replace(climate, inside=0.0), seed=1)
    return [min(weather.factor(step) for _ in range(9)) for step in range(steps)]


def test_the_level_changes_every_40_steps_whatever_is_visited() -> None:
    factors = calm(Climate("", by_block=0.05), 200 * BLOCK_STEPS)
    changes = [step for step, (a, b) in enumerate(pairwise(factors)) if a != b]
    assert {later - earlier for earlier, later in pairwise(changes)} == {BLOCK_STEPS}
    assert stdev(math.log(factors[step]) for step in changes) == pytest.approx(0.05, rel=0.2)


def test_bad_moments_are_of_ten_steps_at_twice_the_time() -> None:
    factors = calm(Climate("", has_bad_moments=True), 20_000)
    assert set(factors) == {1.0, 2.0}
    edges = [step for step, (a, b) in enumerate(pairwise(factors)) if a != b]
    bad = [end - begin for begin, end in zip(edges[::2], edges[1::2], strict=False)]
    assert min(bad) == BAD_STEPS  # two may follow each other at once
    assert median(bad) == BAD_STEPS
    share = BAD_STEPS / (BAD_STEPS + GOOD_STEPS)
    assert factors.count(2.0) / len(factors) == pytest.approx(share, rel=0.15)


def test_drawn_jobs_are_the_same_for_the_same_seed_only() -> None:
    default = truth(drawn_case(1, 0).simulator)
    assert truth(drawn_case(1, 0).simulator) == default
    for seed, number in ((2, 0), (1, 2)):
        assert drawn_case(seed, number).simulator.tensors != drawn_case(1, 0).simulator.tensors
    kinds = [drawn_case(1, number).kind for number in range(4)]
    assert kinds == ["simulator's truth, drawn", "odd truth, drawn"] * 2


@pytest.mark.parametrize("draw", [None, 1])
def test_a_tuning_is_judged_by_the_truth(draw: int | None) -> None:
    row = tune(Setting(problem=0, climate=CLIMATES[1], seed=0, draw=draw))
    assert row["true_speedup"] <= row["possible_speedup"] + 1e-9
    assert row["regret"] == pytest.approx(row["possible_speedup"] / row["true_speedup"] - 1)
    assert tunings.figures([row])["tunings"] == "1"


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


ROOT = Path(__file__).parents[2]


def test_regret_is_against_the_best_of_what_either_side_knows() -> None:
    job = {"problem": "a", "seed": 1, "baseline_seconds": 3.0}
    mine = {**job, "kept_seconds": 2.2, "best_seconds": 2.0, "regret": 0.1, "steps": 80}
    theirs = {**job, "kept_seconds": 2.2, "best_seconds": 2.2, "regret": 0.0}
    for rows in tunings.joined([mine], [theirs]):
        assert rows[0]["regret"] == pytest.approx(0.1)
    assert tunings.difference([mine, mine], [{**theirs, "steps": 90}] * 2).startswith(
        "regret +10.0 % (±0.0)"
    )
    with pytest.raises(ValueError, match="not the same job"):
        tunings.joined([mine], [{**theirs, "baseline_seconds": 4.0}])


def test_a_checkout_beside_itself_differs_by_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of few climates, and both in this checkout."""
    steady = [climate for climate in tunings.CLIMATES if climate.name == "steady"]
    monkeypatch.setattr(tunings, "CLIMATES", steady)
    monkeypatch.setattr(tunings, "rows_of", lambda *_: {"noise": tunings.run(1, 1, draw=77)})
    written = tmp_path / "found.json"
    options = ["--parts=noise", "--tunings=1", "--draw=77", "--processes=1"]
    options += ["--beside", str(ROOT), "--json", str(written)]
    monkeypatch.setattr(sys, "argv", ["tuning.py", *options])
    tuning.main()
    assert "regret +0.0 %" in capsys.readouterr().out
    found = json.loads(written.read_text())["figures"]
    for line in ("all of them", "steady"):
        assert found[f"noise: {line}"] == found[f"noise: {line}, beside"]


def test_a_bad_moment_makes_the_link_slow_in_the_first_visit_to_what_the_best_needs() -> None:
    number = next(n for n in range(32) if bad_moment.level_that_matters(tunings.truth_of(5, n)))
    knob, value = bad_moment.level_that_matters(tunings.truth_of(5, number)) or ("", 0)
    setting = bad_moment.Setting(5, number, knob, value, seed=0)
    simulator = tunings.case_of(5, number).simulator
    wanted = next(c for c in tunings.truth_of(5, number) if c[knob] == value)
    slow = bad_moment.slower(simulator, wanted, 1.8)
    assert slow.step_seconds(wanted) == pytest.approx(
        1.8 * simulator.step_seconds(wanted), rel=0.01
    )
    job = bad_moment.BadMomentJob.make(Tuner(Store("sqlite://")), simulator, bad_moment.CLIMATE, 0)
    job.setting, job.usual = setting, simulator
    slow_visits = set()
    for _ in range(tunings.MOST_STEPS):
        job.run(1)
        if job.is_finished:
            break
        if job.simulator is not simulator:
            assert job.configuration[knob] == value
            slow_visits.add(job.visits)
    job.tuner.store.close()
    assert slow_visits == {1}
    assert job.visits > 1
    told = bad_moment.tune(replace(setting, has_bad_moment=False))
    assert told["visits"] > 0
    lines = bad_moment.show([told, {**told, "has_bad_moment": True}])
    assert lines["none"] == lines["bad moment"]


def test_heavy_tails_reach_further_and_weigh_the_same() -> None:
    def beyond(climate: Climate) -> float:
        (found,) = logs(climate, 1, 20_000)
        return fmean(value < -5 * climate.inside for value in found)  # nobody is early

    assert beyond(Climate("")) < 1e-4 < 1e-3 < beyond(Climate("", is_heavy=True))


def test_steps_that_follow_one_another_are_alike_where_the_climate_says_so() -> None:
    def alike(climate: Climate) -> float:
        (visit,) = logs(climate, 1, 2000)
        calm = [min(value, 0.12) for value in visit]  # no stragglers
        mean = fmean(calm)
        return fmean((a - mean) * (b - mean) for a, b in pairwise(calm)) / stdev(calm) ** 2

    assert alike(Climate("")) < 0.1
    assert alike(Climate("", autocorrelation=0.8)) > 0.5


SCRIPT = """
import json, sys, bagua_autotune
from importlib.util import find_spec
from pathlib import Path
root = Path(bagua_autotune.__file__).parents[2]
rows = [find_spec("bagua_simulator").origin, *sys.argv[1:-2]]
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
    monkeypatch.setattr(tunings, "SCRIPT", tmp_path / "script.py")
    simulator, argument = tunings.rows_of(checkout, ["--draw=1"])["noise"]
    assert str(checkout) not in str(simulator)
    assert str(argument) == "--draw=1"
    with pytest.raises(RuntimeError, match="in place of"):
        # There is no service; Python finds the one that is installed.
        tunings.rows_of(tmp_path / "nothing", [])

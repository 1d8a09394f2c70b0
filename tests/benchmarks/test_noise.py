"""The benchmark of tunings under noise: its weather and its jobs."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean, median, stdev

import pytest

from bagua_simulator.cases import cases as known_cases
from benchmarks.support.noise.tunings import Setting, figures, tune
from benchmarks.support.noise.unseen import MODELS, OddSimulator, cases
from benchmarks.support.noise.weather import CLIMATES, Climate, Weather


def logs(climate: Climate, blocks: int, steps: int) -> list[list[float]]:
    """Of the factors of steps, by block."""
    weather = Weather(climate, seed=1)
    found = []
    for block in range(blocks):
        weather.new_block()
        found.append([math.log(weather.factor(block * steps + step)) for step in range(steps)])
    return found


@pytest.mark.parametrize("climate", CLIMATES, ids=lambda climate: climate.name)
def test_equal_seeds_give_equal_weather(climate: Climate) -> None:
    assert logs(climate, 2, 20) == logs(climate, 2, 20)


def test_blocks_differ_by_what_the_climate_says() -> None:
    for between in (0.0, 0.05):
        centers = [median(block) for block in logs(Climate("", between=between), 200, 31)]
        assert stdev(centers) == pytest.approx(math.hypot(between, 0.007), rel=0.2)


def test_steps_that_follow_one_another_are_alike_where_the_climate_says_so() -> None:
    def alike(climate: Climate) -> float:
        (block,) = logs(climate, 1, 2000)
        calm = [min(value, 0.12) for value in block]  # no stragglers
        mean = fmean(calm)
        return fmean((a - mean) * (b - mean) for a, b in pairwise(calm)) / stdev(calm) ** 2

    assert alike(Climate("")) < 0.1
    assert alike(Climate("", autocorrelation=0.8)) > 0.5


def test_a_drift_slows_the_job_down() -> None:
    weather = Weather(Climate("", inside=0.0, drift=0.1), seed=0)
    assert median(weather.factor(300) for _ in range(9)) == pytest.approx(1.1)


def test_the_cases_are_of_models_that_the_search_was_not_made_on() -> None:
    known = {case.simulator.workload.name for case in known_cases()}
    assert len(set(MODELS) - known) >= 6
    found = cases()
    assert len({case.name for case in found}) == len(found)
    # Any part of the list has both truths.
    truths = [isinstance(case.simulator, OddSimulator) for case in found[:10]]
    assert 3 <= sum(truths) <= 7


def test_a_tuning_is_judged_by_the_truth() -> None:
    row = tune(Setting(problem=0, climate=CLIMATES[2], seed=0))
    assert row["true_speedup"] <= row["possible_speedup"] + 1e-9
    assert row["regret"] == pytest.approx(row["possible_speedup"] / row["true_speedup"] - 1)
    assert figures([row])["tunings"] == "1"

"""The benchmark of tunings under noise: its weather and its jobs."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from statistics import median, stdev

import pytest

from bagua_simulator.cases import cases as known_cases
from benchmarks.support.noise.cases import MODELS, OddSimulator, cases, drawn_case
from benchmarks.support.noise.figures import figures
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


def test_the_cases_are_of_models_that_the_search_was_not_made_on() -> None:
    known = {case.simulator.workload.name for case in known_cases()}
    assert len(set(MODELS) - known) >= 6
    found = cases()
    assert len({case.name for case in found}) == len(found)
    # Any part of the list has both truths.
    truths = [isinstance(case.simulator, OddSimulator) for case in found[:10]]
    assert 3 <= sum(truths) <= 7


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
    assert figures([row])["tunings"] == "1"

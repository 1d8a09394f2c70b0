"""What differs between visits, and which of them were in a bad moment."""

from __future__ import annotations

import random

import pytest

from bagua_autotune.measuring.visits import Visits
from bagua_autotune.model.job import Trial
from bagua_autotune.model.statistics import Estimate
from bagua_wire.configuration import Configuration
from tests.autotune.support import known_visits

DEFAULT, OTHER = Configuration(channels=1), Configuration(channels=8)


def visits_of(configuration: Configuration, *centers: float, first: int = 0) -> list[Trial]:
    return [
        Trial(first + place, "search", configuration, "measured", Estimate(center, 0.01, 6))
        for place, center in enumerate(centers)
    ]


def test_of_single_visits_a_usual_error_is_expected() -> None:
    found = Visits([*visits_of(DEFAULT, 0.0), *visits_of(OTHER, -0.5, first=1)])
    assert 0.005 < found.visit_error < 0.03


@pytest.mark.parametrize("spread", [0.05, 0.1])
def test_the_error_between_visits_is_learned_from_what_was_visited_often(spread: float) -> None:
    generator = random.Random(0)
    centers = [generator.gauss(0.0, spread) for _ in range(20)]
    found = Visits(visits_of(DEFAULT, *centers))
    assert found.visit_error == pytest.approx(spread, rel=0.4)
    assert found.error(Estimate(0.0, 0.01, 6)) > found.visit_error


def test_many_steps_do_not_make_a_visit_surer_than_visits_are() -> None:
    found = known_visits(0.05, 0.03)
    few, many = Estimate(0.0, 0.02, 2), Estimate(0.0, 0.001, 1000)
    assert found.error(few) > found.error(many) >= 0.05


def test_the_error_of_a_single_step_is_that_of_others() -> None:
    found = known_visits(0.0, 0.03)
    assert found.error(Estimate(0.0, float("inf"), 1)) == pytest.approx(0.03)


def test_a_visit_that_another_one_belies_was_in_a_bad_moment() -> None:
    trials = [*visits_of(DEFAULT, 0.0), *visits_of(OTHER, 0.3, -0.4, first=1)]
    assert Visits(trials).in_bad_moments == {1}
    assert Visits(trials).undisturbed == [trials[0], trials[2]]


def test_what_is_slow_more_often_than_not_is_slow() -> None:
    assert Visits(visits_of(OTHER, 0.3, 0.31, -0.4)).in_bad_moments == set()
    assert Visits(visits_of(OTHER, 0.3, -0.41, -0.4)).in_bad_moments == {0}


def test_visits_that_differ_little_count_all() -> None:
    assert Visits(visits_of(OTHER, 0.0, 0.1, 0.25)).in_bad_moments == set()

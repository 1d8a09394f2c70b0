"""What differs between visits, which of them were in a bad moment, and when one is measured well
enough."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import fmean, stdev

import pytest

from bagua_autotune.measuring.visits import Visits, measured, settled, warmup_steps
from bagua_autotune.model.job import Limits, Purpose, Trial
from bagua_autotune.model.statistics import Estimate, estimate
from bagua_wire.configuration import Configuration
from tests.autotune.support import known_visits, present

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


def test_what_is_unsteady_was_in_no_bad_moment() -> None:
    """One visit had slow steps, the other none: that is no accident of the first."""
    unsteady = [Estimate(center, 0.1, 4) for center in (0.45, 0.0)]
    steady = visits_of(DEFAULT, 0.0, 0.0, 0.0)
    trials = [
        Trial(3 + place, "search", OTHER, "measured", each) for place, each in enumerate(unsteady)
    ]
    assert Visits([*steady, *trials]).in_bad_moments == set()
    of_default = [replace(trial, configuration=DEFAULT) for trial in trials]
    assert Visits([*steady, *of_default]).in_bad_moments == {3}


def test_visits_that_differ_little_count_all() -> None:
    assert Visits(visits_of(OTHER, 0.0, 0.1, 0.25)).in_bad_moments == set()


LIMITS = Limits(trial_seconds=60.0)
VISITS = known_visits(0.02, 0.03)


def costs(count: int, noise: float, seconds: float = 0.1) -> list[float]:
    rng = random.Random(0)
    return [math.log(seconds) + rng.gauss(0, noise) for _ in range(count)]


def measure(
    found: list[float],
    limits: Limits = LIMITS,
    rival: Estimate | None = None,
    seconds: float | None = None,
    purpose: Purpose = "confirm",
    visits: Visits | None = VISITS,
) -> Estimate | None:
    took = [seconds or math.exp(cost) for cost in found]
    return measured(found, took, limits, purpose, rival, visits=visits)


def test_the_first_trial_shows_what_steps_differ_by() -> None:
    assert measure(costs(5, 0.001), purpose="search", visits=None) is None
    assert measure(costs(6, 0.001), purpose="search", visits=None) is not None


def test_a_trial_ends_when_more_steps_say_less_than_another_visit_would() -> None:
    quiet, noisy = known_visits(0.02, 0.01), known_visits(0.02, 0.1)
    assert measure(costs(1, 0.001), purpose="search", visits=quiet) is not None
    assert measure(costs(1, 0.001), purpose="confirm", visits=quiet) is None
    assert measure(costs(2, 0.001), purpose="confirm", visits=quiet) is not None
    assert measure(costs(6, 0.1), purpose="search", visits=noisy) is None
    assert measure(costs(7, 0.1), purpose="search", visits=noisy) is not None
    assert measure(costs(8, 0.1), visits=noisy) is None
    noisier = known_visits(0.02, 0.2)
    assert measure(costs(9, 0.2), visits=noisier) is None
    assert measure(costs(10, 0.2), visits=noisier) is not None


def test_outliers_do_not_count_as_measured_steps() -> None:
    quiet = costs(5, 0.001)
    assert measure([*quiet, 0.0], purpose="search", visits=None) is None


def closings(
    noise: float, purpose: Purpose, rival: Estimate | None = None, limits: Limits = LIMITS
) -> list[Estimate]:
    """The estimates of many trials whose truth is 0, each closed as soon as it may be."""
    rng = random.Random(3)
    found = []
    for _ in range(600):
        trial: list[float] = []
        visits = known_visits(0.015, noise)
        while (closed := measure(trial, limits, rival, 1.0, purpose, visits)) is None:
            trial.append(rng.gauss(0, noise))
        found.append(closed)
    return found


def coverage(found: list[Estimate], noise: float) -> float:
    visits = known_visits(0.0, noise)
    return fmean(abs(one.center) <= 1.96 * visits.error(one) for one in found)


def steps(found: list[Estimate]) -> float:
    return fmean(one.count + one.outliers for one in found)


@pytest.mark.parametrize(
    ("noise", "purpose", "longest"),
    [
        (0.005, "search", 1.0),
        (0.02, "search", 3.5),
        (0.05, "search", 7.1),
        (0.005, "confirm", 2.0),
        (0.02, "confirm", 4),
        (0.05, "confirm", 10.1),
    ],
)
def test_the_error_of_a_trial_that_closes_itself_is_honest_and_trials_are_short(
    noise: float, purpose: Purpose, longest: float
) -> None:
    found = closings(noise, purpose)
    assert 0.92 <= coverage(found, noise) <= 0.99
    assert steps(found) <= longest


def test_what_is_far_from_its_rival_need_not_be_known_as_well() -> None:
    far = closings(0.05, "confirm", rival=Estimate(0.4, 0.01, 20))
    near = closings(0.05, "confirm", rival=Estimate(0.0, 0.01, 20))
    assert 0.92 <= coverage(far, 0.05) <= 0.99
    assert steps(far) < 0.8 * steps(near)


@pytest.mark.parametrize("level", [0.1, -0.1, 0.3, -0.3])
def test_the_error_of_a_trial_that_is_closed_early_is_honest(level: float) -> None:
    """It is closed where it looks worse than it is; that must not make its error wrong."""
    found = closings(0.03, "search", rival=Estimate(-level, 0.01, 10))
    assert 0.92 <= coverage(found, 0.03) <= 0.99


def test_time_closes_a_noisy_trial_but_not_a_single_step() -> None:
    limits, noisy = Limits(trial_seconds=1.0), known_visits(0.01, 0.3)
    assert measure(costs(9, 0.3), limits, seconds=0.1, visits=noisy) is None
    assert measure(costs(10, 0.3), limits, seconds=0.1, visits=noisy) is not None
    assert measure(costs(1, 0.3), limits, seconds=10, visits=noisy) is None
    assert measure(costs(2, 0.3), limits, seconds=10, visits=noisy) is not None


RIVAL = Estimate(math.log(0.1), 0.002, 20)


def test_a_clearly_worse_trial_is_closed_at_once_and_a_near_one_is_not() -> None:
    noisy = known_visits(0.001, 0.04)
    assert measure([math.log(0.2)], rival=RIVAL, purpose="search", visits=noisy) is not None
    assert measure([math.log(0.108)], rival=RIVAL, purpose="search", visits=noisy) is None
    assert measure([math.log(0.08)], rival=RIVAL, purpose="search", visits=noisy) is None


def test_a_trial_whose_steps_still_get_faster_is_not_closed_for_being_worse() -> None:
    """As where idle connections, or new ones, begin slowly."""
    far = math.log(0.2)
    assert measure([far, far - 0.1], rival=RIVAL, purpose="search") is None
    assert measure([far, far - 0.1, far - 0.2], rival=RIVAL, purpose="search") is None
    assert measure([far, far - 0.1, far - 0.11], rival=RIVAL, purpose="search") is not None


def test_slow_first_steps_do_not_count() -> None:
    wobbles = (0.0, 0.004, -0.004, 0.002, -0.002, 0.001, 0.0)
    steady = [math.log(0.1) + wobble for wobble in wobbles]
    for purpose in ("search", "confirm"):
        slow = [math.log(0.16), math.log(0.14), math.log(0.11)]
        found = present(measure([*slow, *steady], purpose=purpose))
        assert found.center == pytest.approx(math.log(0.1), abs=0.005)
        assert found.half_width < 0.02


@pytest.mark.parametrize("bad", [[5, 6, 7, 8], [0, 1, 2], [0, 1, 6, 7, 8]])
def test_a_bad_moment_inside_a_visit_does_not_count(bad: list[int]) -> None:
    found = [cost + 0.7 * (place in bad) for place, cost in enumerate(costs(9, 0.02))]
    good = [cost for place, cost in enumerate(found) if place not in bad]
    own, expected = settled(found, visits=VISITS), estimate(good)
    assert own.center == pytest.approx(expected.center, abs=0.001)
    assert (own.count, own.outliers) == (expected.count, expected.outliers)
    assert own.standard_error == pytest.approx(expected.standard_error, rel=0.05)
    # Not even if it lasted longer than the rest.
    longer = [*found, *(cost + 0.7 for cost in costs(9, 0.02))]
    assert settled(longer, visits=VISITS).center == pytest.approx(math.log(0.1), abs=0.03)


def test_slow_steps_in_succession_count_where_steps_differ_by_as_much() -> None:
    found = [cost + 0.7 * (place > 4) for place, cost in enumerate(costs(9, 0.02))]
    assert settled(found, visits=VISITS).count == 5
    assert settled(found, visits=known_visits(0.02, 0.2)).count == 9


def cost_of_mean_time(costs: list[float]) -> float:
    return math.log(fmean(math.exp(cost) for cost in costs))


def test_what_is_slow_every_other_step_takes_the_mean_of_its_times() -> None:
    found = [cost + 0.7 * (place % 2) for place, cost in enumerate(costs(11, 0.02))]
    for steps in (found, [0.0, 0.0, 0.7, 0.7]):
        own = settled(steps, visits=VISITS)
        assert (own.center, own.count) == (pytest.approx(cost_of_mean_time(steps)), len(steps))


@pytest.mark.parametrize(
    "milliseconds", [[136, 86, 87, 117, 136, 85, 86], [123, 114, 114, 123, 114, 118, 114]]
)
def test_what_is_slow_in_three_steps_of_seven_takes_their_mean(milliseconds: list[int]) -> None:
    """As two hosts on one GPU were seen to be with 8 channels: no accident, and no fast setting."""
    found = [math.log(each / 1000) for each in milliseconds]
    own = settled(found, visits=known_visits(0.02, 0.005))
    assert (own.center, own.outliers) == (pytest.approx(cost_of_mean_time(found)), 0)
    assert own.standard_error == pytest.approx(stdev(milliseconds) / fmean(milliseconds) / 7**0.5)


def test_a_visit_with_one_slow_step_is_measured_until_it_is_known_whether_it_is_an_accident() -> (
    None
):
    found = [-1.19, -1.14, -0.6, -1.16]
    assert measure(found, purpose="search") is None
    accident = present(measure([*found, -1.17, -1.15, -1.16], purpose="search"))
    assert (accident.center, accident.outliers) == (pytest.approx(-1.16, abs=0.01), 1)
    often = present(measure([*found, -0.65, -1.15, -0.62], purpose="search"))
    assert (often.center, often.outliers) == (pytest.approx(-0.89, abs=0.01), 0)


def test_what_is_like_an_unsteady_setting_is_less_sure_however_its_own_steps_look() -> None:
    """By the number of channels: full cores make steps slow in turns."""
    steady, unsteady = Estimate(-1.0, 0.01, 4), Estimate(-0.9, 0.1, 4)
    settings = [Configuration(channels=channels) for channels in (1, 1, 2, 2, 8, 8)]
    found = [*[steady] * 4, *[unsteady] * 2]
    visits = Visits(
        [
            Trial(place, "search", setting, "measured", each)
            for place, (setting, each) in enumerate(zip(settings, found, strict=True))
        ]
    )
    lucky = [-1.2, -1.21, -1.19]
    error = {
        channels: visits.error_inside(estimate(lucky), Configuration(channels=channels))
        for channels in (1, 2, 4, 8, 16, 32)
    }
    assert error[1] == error[2] == error[32] < 0.02, "as others"
    assert 0.05 < error[4] < error[8] == error[16], "of 4, half the visits alike are of 2"
    took = [math.exp(cost) for cost in lucky]
    closed = [
        measured(lucky, took, LIMITS, "search", steady, visits, Configuration(channels=channels))
        for channels in (1, 16)
    ]
    assert [each is not None for each in closed] == [True, False]


def test_a_confirming_trial_is_not_closed_for_being_worse() -> None:
    slow = [math.log(0.2) + wobble for wobble in (0.0, 0.004, -0.004, 0.002, -0.002)]
    for count in range(2, 6):
        noisy = known_visits(0.001, 0.5)
        assert measure(slow[:count], rival=RIVAL, visits=noisy) is None


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([0.1] * 9, None),
        ([0.1] * 10, 5),  # the five that settled it count
        ([1.0] * 5 + [0.1] * 4, None),
        ([1.0] * 5 + [0.1] * 10, 8),  # the five before these were mostly fast
        ([0.985**step for step in range(12)], 10),  # it may go on to fall
        ([20.0, 20.0, 0.1], 2),  # warmup_seconds passed
        ([], None),
    ],
)
def test_warming_up_ends_when_steps_settle_or_time_is_up(
    seconds: list[float], expected: int | None
) -> None:
    assert warmup_steps(seconds, 30.0) == expected


def test_no_warmup_can_be_asked_for() -> None:
    assert warmup_steps([], 0.0) == 0

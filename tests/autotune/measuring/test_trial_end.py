from __future__ import annotations

import math
import random
from statistics import fmean

import pytest

from bagua_autotune.measuring.trial_end import measured, warmup_steps
from bagua_autotune.model.job import Limits, Purpose
from bagua_autotune.model.statistics import Estimate, estimate

LIMITS = Limits(trial_seconds=60.0)


def costs(count: int, noise: float, seconds: float = 0.1) -> list[float]:
    rng = random.Random(0)
    return [math.log(seconds) + rng.gauss(0, noise) for _ in range(count)]


def measure(
    found: list[float],
    limits: Limits = LIMITS,
    rival: Estimate | None = None,
    seconds: float | None = None,
    purpose: Purpose = "confirm",
) -> Estimate | None:
    took = [seconds or math.exp(cost) for cost in found]
    return measured(found, took, limits, purpose, rival)


def test_quiet_steps_close_a_trial_after_six_and_noisy_ones_later() -> None:
    assert measure(costs(5, 0.001)) is None
    assert measure(costs(6, 0.001)) is not None
    assert measure(costs(9, 0.1)) is None


def test_a_noisy_trial_of_the_search_is_closed_sooner_than_one_that_confirms() -> None:
    noisy = costs(20, 0.1)
    assert estimate(noisy).outliers == 0
    assert measure(noisy[:6], purpose="search") is None
    assert measure(noisy[:7], purpose="search") is not None
    assert measure(noisy[:9]) is None
    assert measure(noisy[:10]) is not None


def test_outliers_do_not_count_as_measured_steps() -> None:
    quiet = costs(5, 0.001)
    assert measure([*quiet, 0.0]) is None


def closings(
    noise: float, purpose: Purpose, rival: Estimate | None = None, limits: Limits = LIMITS
) -> list[Estimate]:
    """The estimates of many trials whose truth is 0, each closed as soon as it may be."""
    rng = random.Random(3)
    found = []
    for _ in range(600):
        trial: list[float] = []
        while (closed := measure(trial, limits, rival, 1.0, purpose)) is None:
            trial.append(rng.gauss(0, noise))
        found.append(closed)
    return found


def coverage(found: list[Estimate]) -> float:
    return fmean(one.low <= 0 <= one.high for one in found)


def steps(found: list[Estimate]) -> float:
    return fmean(one.count + one.outliers for one in found)


@pytest.mark.parametrize(
    ("noise", "purpose", "longest"),
    [
        (0.005, "search", 4.5),
        (0.02, "search", 7),
        (0.05, "search", 7.1),
        (0.005, "confirm", 6.5),
        (0.02, "confirm", 9),
        (0.05, "confirm", 10.1),
    ],
)
def test_stopping_when_narrow_leaves_the_interval_honest_and_trials_short(
    noise: float, purpose: Purpose, longest: float
) -> None:
    found = closings(noise, purpose)
    assert 0.92 <= coverage(found) <= 0.99
    assert steps(found) <= longest


def test_what_is_far_from_its_rival_need_not_be_known_as_well() -> None:
    far = closings(0.05, "confirm", rival=Estimate(0.4, 0.01, 20))
    near = closings(0.05, "confirm", rival=Estimate(0.0, 0.01, 20))
    assert 0.92 <= coverage(far) <= 0.99
    assert steps(far) < 0.8 * steps(near)


@pytest.mark.parametrize("level", [0.1, -0.1, 0.3, -0.3])
def test_the_interval_of_a_trial_that_is_closed_early_is_honest(level: float) -> None:
    """It is closed where it looks worse than it is; that must not make its interval wrong."""
    found = closings(0.03, "search", rival=Estimate(-level, 0.01, 10))
    assert 0.92 <= coverage(found) <= 0.99


def test_time_closes_a_noisy_trial_but_not_before_three_steps() -> None:
    limits = Limits(trial_seconds=1.0)
    assert measure(costs(9, 0.3), limits, seconds=0.1) is None
    assert measure(costs(11, 0.3), limits, seconds=0.1) is not None
    assert measure(costs(2, 0.3), limits, seconds=10) is None
    assert measure(costs(3, 0.3), limits, seconds=10) is not None


RIVAL = Estimate(math.log(0.1), 0.002, 20)


def test_a_clearly_worse_trial_is_closed_early() -> None:
    slow = [math.log(0.13) + wobble for wobble in (0.0, 0.004, -0.004)]
    assert measure(slow, rival=RIVAL, purpose="search") is not None
    assert measure(slow[:2], rival=RIVAL, purpose="search") is None
    assert measure(slow, purpose="search") is None
    assert measure([cost - 0.2 for cost in slow], rival=RIVAL, purpose="search") is None


def test_a_far_slower_trial_is_closed_after_two_steps_that_both_say_so() -> None:
    far = math.log(0.2)
    assert measure([far], rival=RIVAL, purpose="search") is None
    assert measure([far, far + 0.3], rival=RIVAL, purpose="search") is not None
    assert measure([far, math.log(0.12)], rival=RIVAL, purpose="search") is None
    assert measure([far, far], purpose="search") is None


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
        found = measure([*slow, *steady], purpose=purpose)
        assert found is not None
        assert found.center == pytest.approx(math.log(0.1), abs=0.005)
        assert found.half_width < 0.02


def test_a_confirming_trial_is_not_closed_for_being_worse() -> None:
    slow = [math.log(0.2) + wobble for wobble in (0.0, 0.004, -0.004, 0.002, -0.002)]
    for count in range(2, 6):
        assert measure(slow[:count], rival=RIVAL) is None


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([0.1] * 9, None),
        ([0.1] * 10, 10),
        ([1.0] * 5 + [0.1] * 4, None),
        ([1.0] * 5 + [0.1] * 10, 13),  # settled: the 5 before the last 5 are mostly fast
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

from __future__ import annotations

import math
import random
from statistics import fmean

import pytest

from bagua_autotune.model.job import Limits
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.tuning.measurement import measured, warmup_steps

LIMITS = Limits(trial_seconds=60.0)


def costs(count: int, noise: float, seconds: float = 0.1) -> list[float]:
    rng = random.Random(0)
    return [math.log(seconds) + rng.gauss(0, noise) for _ in range(count)]


def measure(
    found: list[float],
    limits: Limits = LIMITS,
    rival: Estimate | None = None,
    seconds: float | None = None,
) -> Estimate | None:
    return measured(found, [seconds or math.exp(cost) for cost in found], limits, rival)


def test_quiet_steps_close_a_trial_after_eight_and_noisy_ones_later() -> None:
    assert measure(costs(7, 0.001)) is None
    assert measure(costs(8, 0.001)) is not None
    assert measure(costs(10, 0.1)) is None
    found = measure(costs(400, 0.1))
    assert found is not None
    assert found.half_width <= 0.025


def test_outliers_do_not_count_as_measured_steps() -> None:
    quiet = costs(7, 0.001)
    assert measure([*quiet, 0.0]) is None


@pytest.mark.parametrize(("noise", "longest"), [(0.005, 9), (0.02, 10), (0.03, 15), (0.05, 25)])
def test_stopping_when_narrow_leaves_the_interval_honest_and_trials_short(
    noise: float, longest: float
) -> None:
    rng = random.Random(3)
    found = []
    for _ in range(600):
        trial: list[float] = []
        while (closed := measure(trial, Limits(trial_seconds=25.0), seconds=1.0)) is None:
            trial.append(rng.gauss(0, noise))
        found.append(closed)
    assert 0.92 <= fmean(one.low <= 0 <= one.high for one in found) <= 0.99
    assert fmean(one.count + one.outliers for one in found) <= longest


def test_time_closes_a_noisy_trial_but_not_before_three_steps() -> None:
    limits = Limits(trial_seconds=1.0)
    assert measure(costs(9, 0.3), limits) is None
    assert measure(costs(30, 0.3), limits) is not None
    assert measure(costs(2, 0.3, seconds=10), limits) is None
    assert measure(costs(3, 0.3, seconds=10), limits) is not None


def test_a_clearly_worse_trial_is_closed_early() -> None:
    rival = Estimate(math.log(0.1), 0.002, 20)
    assert measure(costs(3, 0.01, seconds=0.2), rival=rival) is not None
    assert measure(costs(2, 0.01, seconds=0.2), rival=rival) is None
    assert measure(costs(3, 0.01, seconds=0.105), rival=rival) is None


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

from __future__ import annotations

import math
import random

import pytest

from bagua_autotune.model.job import Limits
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.tuning.measurement import measured, warmup_steps

LIMITS = Limits(trial_seconds=60.0)


def costs(count: int, noise: float, seconds: float = 0.1) -> list[float]:
    rng = random.Random(0)
    return [math.log(seconds) + rng.gauss(0, noise) for _ in range(count)]


def measure(
    found: list[float], limits: Limits = LIMITS, rival: Estimate | None = None
) -> Estimate | None:
    return measured(found, [math.exp(cost) for cost in found], limits, rival)


def test_quiet_steps_close_a_trial_after_five_and_noisy_ones_later() -> None:
    assert measure(costs(4, 0.001)) is None
    assert measure(costs(5, 0.001)) is not None
    assert measure(costs(10, 0.1)) is None
    found = measure(costs(400, 0.1))
    assert found is not None
    assert found.half_width <= 0.015


def test_outliers_do_not_count_as_measured_steps() -> None:
    quiet = costs(4, 0.001)
    assert measure([*quiet, 0.0]) is None


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

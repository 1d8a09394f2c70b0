from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_autotune.model.statistics import Estimate, difference, estimate

COSTS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@given(COSTS)
def test_any_finite_costs_have_an_estimate_within_their_range(costs: list[float]) -> None:
    found = estimate(costs)
    assert min(costs) <= found.center <= max(costs)
    assert found.count + found.outliers == len(costs)
    assert found.standard_error >= 0
    assert found.low <= found.center <= found.high


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        estimate([1.0, bad])
    with pytest.raises(ValueError, match="no costs"):
        estimate([])


def test_one_cost_has_no_known_error_and_equal_ones_none() -> None:
    assert estimate([3.0]).standard_error == math.inf
    assert estimate([3.0]).low == -math.inf
    assert estimate([3.0] * 9) == Estimate(3.0, 0.0, 9)


def test_outliers_are_counted_and_not_averaged_in() -> None:
    rng = random.Random(0)
    clean = [rng.gauss(0, 0.01) for _ in range(50)]
    found = estimate([*clean, 5.0, 7.0])
    assert found.outliers >= 2
    assert abs(found.center) < 0.01
    assert found.half_width < 0.01


def test_an_outlier_among_equal_costs_is_one() -> None:
    assert estimate([1.0] * 9 + [2.0]).outliers == 1


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    rng = random.Random(1)
    hits = 0
    for _ in range(400):
        found = estimate([rng.gauss(0, 1) for _ in range(15)])
        hits += found.low <= 0 <= found.high
    assert hits >= 0.9 * 400


def test_blocks_that_differ_widen_the_interval() -> None:
    def block(center: float) -> Estimate:
        return Estimate(center, 0.001, 100)

    steady = difference([block(1.0), block(1.0)], [block(0.9), block(0.9)])
    shaky = difference([block(1.1), block(0.9)], [block(1.0), block(0.8)])
    assert steady.low > 0
    assert shaky.center == pytest.approx(0.1)
    assert shaky.low < 0 < shaky.high


def test_a_difference_works_with_one_block_and_without_spread() -> None:
    exact = difference([Estimate(2.0, 0.0, 5)] * 2, [Estimate(1.0, 0.0, 5)] * 2)
    assert (exact.low, exact.center, exact.high) == (1.0, 1.0, 1.0)
    single = difference([Estimate(2.0, 0.1, 10)], [Estimate(1.0, 0.1, 10)])
    assert 0 < single.low < 1 < single.high < 2
    unknown = difference([Estimate(2.0, math.inf, 1)], [Estimate(1.0, math.inf, 1)])
    assert unknown.low == -math.inf


def test_the_difference_of_equals_seldom_excludes_zero() -> None:
    rng = random.Random(2)
    wrong = 0
    for _ in range(300):
        sides = [
            [
                estimate([center + rng.gauss(0, 0.05) for _ in range(10)])
                for center in (rng.gauss(0, 0.02), rng.gauss(0, 0.02))
            ]
            for _ in range(2)
        ]
        gain = difference(*sides)
        wrong += not gain.low <= 0 <= gain.high
    assert wrong <= 0.08 * 300

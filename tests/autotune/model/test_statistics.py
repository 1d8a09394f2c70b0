from __future__ import annotations

import math
import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_autotune.model.statistics import Estimate, estimate, pooled

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


@given(st.lists(st.floats(0, 0.01), min_size=1, max_size=30), st.integers(1, 30))
def test_what_is_slow_more_often_than_by_accident_is_slow(costs: list[float], slow: int) -> None:
    """One of seven may be an accident, two of 14; where there are more, all count."""
    count = len(costs) + slow
    if len(costs) > slow > math.ceil(count / 7):
        found = estimate([*costs, *[1.0] * slow])
        assert found.outliers == 0
        assert found.center == pytest.approx((sum(costs) + slow) / count)


@pytest.mark.parametrize("count", [5, 8, 30])
def test_the_interval_holds_the_truth_as_often_as_it_says(count: int) -> None:
    rng = random.Random(count)
    found = [estimate([rng.gauss(0, 1) for _ in range(count)]) for _ in range(2000)]
    assert 0.93 <= fmean(one.low <= 0 <= one.high for one in found) <= 0.98


@given(st.lists(st.tuples(st.floats(-1e100, 1e100), st.floats(0, 1e100)), min_size=1, max_size=9))
def test_what_is_pooled_lies_between(blocks: list[tuple[float, float]]) -> None:
    found = pooled([Estimate(center, error, 5) for center, error in blocks])
    centers = [center for center, _ in blocks]
    slack = 1e-9 * max(abs(center) for center in centers)
    assert min(centers) - slack <= found.center <= max(centers) + slack
    assert 0 <= found.standard_error < math.inf
    assert found.count == 5 * len(blocks)


def test_precise_measurements_count_for_more_but_luckily_narrow_ones_do_not() -> None:
    sure, unsure = Estimate(1.0, 0.01, 9), Estimate(2.0, 0.1, 9)
    assert pooled([sure, sure, unsure]).center == pytest.approx(1.0, abs=0.01)
    lucky = Estimate(2.0, 0.0, 3)
    assert pooled([sure, sure, lucky]).center == pytest.approx(4 / 3)
    assert pooled([sure]) == sure
    with pytest.raises(ValueError, match="no blocks"):
        pooled([])


def test_measurements_of_an_unknown_error_are_pooled() -> None:
    single = Estimate(2.0, math.inf, 1)
    assert pooled([single]) == single
    # Like one cost of the others: a ninth of their weight.
    assert pooled([Estimate(1.0, 0.01, 9), single]).center == pytest.approx(1.1)
    two = pooled([single, Estimate(4.0, math.inf, 1)])
    assert (two.center, two.standard_error, two.count) == (3.0, pytest.approx(1.0), 2)
    assert two.half_width > 10


@pytest.mark.parametrize("blocks", [2, 5])
def test_the_interval_of_pooled_blocks_holds_the_truth_often_enough(blocks: int) -> None:
    rng = random.Random(blocks)
    held = 0
    for _ in range(500):
        parts = [estimate([rng.gauss(0, 1) for _ in range(8)]) for _ in range(blocks)]
        found = pooled(parts)
        held += found.low <= 0 <= found.high
    assert held / 500 >= 0.93

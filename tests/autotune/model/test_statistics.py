from __future__ import annotations

import math
import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_autotune.model.statistics import Estimate, Interval, difference, estimate, pooled

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


def turns(*centers: float, error: float = 0.001) -> Interval:
    """The difference of blocks measured in the order A B B A ..."""
    blocks = [Estimate(center, error, 100) for center in centers]
    return difference(blocks, [turn % 4 in (0, 3) for turn in range(len(blocks))])


def test_blocks_that_differ_widen_the_interval() -> None:
    steady = turns(1.0, 0.9, 0.9, 1.0, 1.0, 0.9)
    shaky = turns(1.1, 1.0, 0.8, 0.9, 1.1, 0.9)
    assert steady.center == pytest.approx(0.1)
    assert steady.low > 0
    assert shaky.low < 0 < shaky.high


def test_one_block_that_could_not_tell_a_pause_says_nothing_of_the_others() -> None:
    errors = [0.001, 0.001, 0.001, 0.14]
    blocks = [Estimate(c, e, 3) for c, e in zip((1.0, 0.6, 0.6, 1.0), errors, strict=True)]
    found = difference(blocks, [True, False, False, True])
    assert 0 < found.low < 0.4 < found.high < 0.8


def test_few_blocks_do_not_know_how_much_blocks_differ() -> None:
    few, many = turns(1.0, 0.97, 0.97, 1.0), turns(*[1.0, 0.97, 0.97, 1.0] * 3)
    assert few.low < 0 < many.low


def test_what_was_repeated_besides_tells_how_much_blocks_differ() -> None:
    blocks = [Estimate(center, 0.001, 100) for center in (1.0, 0.97, 0.97, 1.0)]
    sides = [True, False, False, True]

    def beside(*groups: list[float]) -> Interval:
        repeats = [[Estimate(center, 0.001, 100) for center in group] for group in groups]
        return difference(blocks, sides, repeats=repeats)

    alone = beside()
    calm = beside([2.0, 2.0, 2.001], [3.0, 3.001])
    wild = beside([2.0, 2.2, 1.8])
    assert wild.low < alone.low < calm.low


@pytest.mark.parametrize("between", [0.0, 0.03])
def test_an_interval_that_is_looked_at_after_each_pair_holds_the_truth(between: float) -> None:
    """Whoever stops as soon as it is clear of 0 stops on lucky blocks, too."""
    rng = random.Random(1)
    held = stopped = 0
    for _ in range(300):
        blocks: list[Estimate] = []
        for turn in range(12):
            center = 0.05 * (turn % 4 in (1, 2)) + rng.gauss(0, between)
            blocks.append(estimate([rng.gauss(center, 0.02) for _ in range(7)]))
            found = None
            if turn in (3, 5, 7, 9, 11):
                found = difference(blocks, [place % 4 in (1, 2) for place in range(turn + 1)])
                if found.low > 0:
                    break
        if found is not None and found.low > 0:
            stopped += 1
            held += found.low <= 0.05 <= found.high
    assert stopped > 150
    assert held / stopped >= 0.93


TURNS = [False, True, True, False, False, True]
"""Of the winner's blocks (False) and the baseline's."""


def test_a_disturbed_block_does_not_hide_a_gain() -> None:
    blocks = [Estimate(center, 0.004, 7) for center in (0.0, 0.5, 0.503, 0.0, 0.001, 0.502)]
    blocks[3] = Estimate(0.95, 0.45, 3)
    found = difference(blocks, TURNS)
    assert 0 < found.low < 0.5 < found.high < 0.6
    assert found.center == pytest.approx(0.5, abs=0.02)


def test_one_undisturbed_block_of_a_side_proves_nothing() -> None:
    blocks = [Estimate(center, 0.004, 7) for center in (0.0, 0.5, 0.503, 0.0)]
    assert difference(blocks, TURNS[:4]).low > 0.3
    blocks[3] = Estimate(0.9, 0.45, 3)
    assert difference(blocks, TURNS[:4]).low <= 0


def test_a_configuration_that_disturbs_itself_is_not_better_for_that() -> None:
    blocks = [Estimate(center, 0.004, 7) for center in (0.0, 0.05, 0.05, 0.0, 0.0, 0.05)]
    blocks[3] = Estimate(0.5, 0.1, 8)
    assert difference(blocks, TURNS).low < 0


def test_blocks_of_equal_costs_beside_others_count_like_these() -> None:
    blocks = [Estimate(center, 0.0, 7) for center in (0.0, 0.001, 0.001)]
    found = difference([*blocks, Estimate(0.2, 0.001, 7)], TURNS[:4])
    assert found.low < 0


@given(st.floats(-1, 1), st.floats(-1e3, 1e3), st.floats(-0.1, 0.1))
def test_a_steady_drift_changes_nothing(gain: float, start: float, drift: float) -> None:
    sides = [turn % 4 in (0, 3) for turn in range(6)]
    found = turns(*(start + drift * turn + gain * side for turn, side in enumerate(sides)))
    assert found.center == pytest.approx(gain, abs=1e-9)
    assert 0 < found.high - found.low < 0.07


def test_a_difference_works_without_spread_and_without_known_errors() -> None:
    exact = turns(2.0, 1.0, 1.0, 2.0, error=0.0)
    assert exact.center == pytest.approx(1.0)
    assert 0.9 < exact.low < 1 < exact.high < 1.1
    single = [Estimate(center, math.inf, 1) for center in (2.0, 1.1, 1.0, 2.0)]
    found = difference(single, [True, False, False, True])
    assert 0.9 < found.center < 1
    assert found.low < 0.9
    for sides in ([True] * 4, [True, False, False, False], [False] * 4):
        with pytest.raises(ValueError, match="at least two"):
            difference(single, sides)

"""Windows that lack some ranks' reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_autotune.measuring.objective import LARGEST_SPEED
from bagua_autotune.model.job import Observation
from bagua_v1.tuning import are_enough, comparable

pytestmark = pytest.mark.slow

speeds = st.floats(-LARGEST_SPEED, LARGEST_SPEED) | st.sampled_from([5e-324, -5e-324])


def window(*values: float | None) -> Observation:
    return Observation(100, values)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((12.0, None), 9.0),  # in proportion: rank 1 has half the speed
        ((None, 6.0), 9.0),
        ((5e-324, None), 0.0),
        ((-5.0, None), -7.5),  # not of one sign: by the difference
    ],
)
def test_a_missing_rank_is_taken_to_differ_as_it_did_before(values, expected):
    (found,) = comparable([window(*values)], [window(10.0, 5.0), window(20.0, 10.0)][:1], 2)
    (mean,) = found.values
    assert mean == pytest.approx(expected)


def test_complete_windows_stay_and_incomparable_ones_go():
    complete, partial = window(1.0, 2.0), window(None, 3.0)
    assert comparable([complete, partial], [], 2) == [complete]
    assert comparable([partial], [window(1.0)], 2) == []
    assert comparable([complete], [complete], 2) == [complete]
    assert comparable([window(None, None, 4.0)], [complete], 2) == []


@pytest.mark.parametrize(
    ("speeds", "is_long", "expected"),
    [
        ([], True, False),
        ([100], True, False),
        ([100, 104], False, True),
        ([100, 106], False, False),
        ([100, 106], True, False),
        ([-100, -104], False, True),
        ([0, 0], False, True),
        ([1, -1], False, False),
        ([100, 66, 100], False, False),
        ([100, 66, 100], True, True),
        ([100, 66, 100, 66], False, True),
    ],
)
def test_two_windows_suffice_only_if_they_agree(speeds, is_long, expected):
    windows = [Observation(100 * i, (speed, speed)) for i, speed in enumerate(speeds)]
    assert are_enough(windows, is_long) == expected


@given(
    windows=st.lists(st.lists(st.none() | speeds, min_size=1, max_size=4), max_size=6),
    references=st.lists(st.lists(st.none() | speeds, min_size=1, max_size=4), max_size=6),
    rank_count=st.integers(1, 4),
)
def test_whatever_was_reported_gives_finite_numbers(windows, references, rank_count):
    seen = [window(*values) for values in windows if any(v is not None for v in values)]
    found = comparable(seen, [*seen, *(window(*values) for values in references)], rank_count)
    means = [sum(v for v in each.values if v is not None) for each in found]
    assert all(abs(mean) <= 4 * LARGEST_SPEED for mean in means)

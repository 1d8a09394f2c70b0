"""Numbers in the words that people read."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bagua_autotune.model.text import describe_left, describe_seconds, describe_speedup


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (0.0123, "12.3 ms"),
        (0.3, "300 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (1.0, "1 s"),
        (119.4, "119 s"),
        (119.6, "2.0 min"),
        (124, "2.1 min"),
        (1199, "20.0 min"),
        (1201, "20 min"),
        (7169, "119 min"),
        (7199, "2.0 h"),
        (12_600, "3.5 h"),
    ],
)
def test_times_read_well(seconds: float, text: str) -> None:
    assert describe_seconds(seconds) == text


@given(st.floats(1e-4, 1e6))
@example(124.0)
@example(149.0)
@example(7170.0)
def test_a_time_is_near_and_never_has_as_many_of_a_unit_as_the_next_begins_at(
    seconds: float,
) -> None:
    number, unit = describe_seconds(seconds).split()
    factors = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
    assert float(number) * factors[unit] == pytest.approx(seconds, rel=0.0251)
    assert float(number) < {"ms": 1000, "s": 120, "min": 120, "h": 1e9}[unit]


def test_what_is_left() -> None:
    assert [describe_left(s) for s in (0.3, 1.2, 80.4, 7199)] == [
        "under 1 s left", "at most 1 s left", "at most 80 s left", "at most 2.0 h left",
    ]  # fmt: skip


def test_an_interval_without_a_width_is_not_one() -> None:
    assert describe_speedup(1.2, 1.1, 1.3) == "1.20x (1.10 to 1.30)"
    assert describe_speedup(1.2, 1.2, 1.2) == "1.20x"
    assert describe_speedup(1.2, None, 1.3) == "1.20x"

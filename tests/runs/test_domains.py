"""What the values of an option may look like."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_runs.domains import (
    LARGEST,
    MOST_VALUES,
    plain,
    values_of,
    whole_number,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4096", 4096),
        ("4KiB", 4096),
        ("1.5MiB", 1572864),
        ("2GiB", 2**31),
        ("5e8", 500_000_000),
        ("2.5E3", 2500),
        ("0", 0),
        ("1e-4", None),
        ("0.5", None),
        ("-1", None),
        ("4kb", None),
        ("1e99", None),
        ("٤", None),
        ("", None),
        ("Ring", None),
    ],
)
def test_numbers(text: str, number: int | None) -> None:
    assert whole_number(text) == number


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("Ring, Tree,", ("Ring", "Tree")),
        ("5e8,1MiB,16", ("500000000", "1048576", "16")),
        ("0.5,2.0,1e-3", ("0.5", "2.0", "1e-3")),
        ("1,2,1", ("1", "2")),
        ("true,false", ("true", "false")),
        ("1..4", ("1", "2", "3", "4")),
        ("0..100", ("0", "12", "25", "37", "50", "62", "75", "87", "100")),
        ("1MiB..8MiB:log", ("1048576", "2097152", "4194304", "8388608")),
        ("1..9:log", ("1", "2", "4", "9")),
        ("../a,../b", ("../a", "../b")),
    ],
)
def test_lists_and_ranges(text: str, values: tuple[str, ...]) -> None:
    assert values_of(text) == values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no value"),
        (" , ", "has no value"),
        ("8..2", "8 is not below 2"),
        ("4..4", "4 is not below 4"),
        ("0..8:log", "begins above 0"),
        ("1..x", "is no range: write LOW..HIGH"),
        ("1..8:lin", "is no range: write LOW..HIGH"),
        ("1..8,16", "a range stands alone"),
    ],
)
def test_what_is_no_domain_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        values_of(text)


@given(st.integers(0, LARGEST - 1), st.integers(1, LARGEST), st.booleans())
def test_a_range_has_both_ends_and_few_values_in_order(low: int, width: int, log: bool) -> None:
    low, high = (low + 1 if log else low), min(low + 1 + width, LARGEST)
    if low >= high:
        return
    values = [int(value) for value in values_of(f"{low}..{high}" + ":log" * log)]
    assert values[0] == low
    assert values[-1] == high
    assert values == sorted(set(values))
    assert 2 <= len(values) <= MOST_VALUES
    if log and high >= 4 * low:
        ratios = [after / before for before, after in pairwise(values)]
        # Equal steps but for the last, which is neither tiny nor as large as two.
        assert len(set(ratios[:-1])) == 1
        assert 1.4 < ratios[-1] < ratios[0] * 1.5 + 1e-9


@given(st.text(max_size=30))
def test_any_text_is_values_or_an_error_in_words(text: str) -> None:
    try:
        values = values_of(text)
    except ValueError:
        return
    assert values == tuple(dict.fromkeys(values))
    assert all(plain(value) == value for value in values)

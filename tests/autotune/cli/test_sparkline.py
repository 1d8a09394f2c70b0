"""Numbers as block characters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bagua_autotune.cli.overview_panel import BLOCKS, condense, sparkline

NUMBERS = st.lists(st.floats(1e-9, 1e9), max_size=300)


@given(NUMBERS, st.integers(0, 90))
def test_it_is_never_wider_and_shows_the_lowest_lowest_and_the_highest_highest(
    values: list[float], width: int
) -> None:
    line = sparkline(values, width)
    assert len(line) == min(len(values), width)
    shares = condense(values, width)
    assert all(min(values) <= share <= max(values) for share in shares)
    if line and min(shares) < max(shares):
        assert line[shares.index(min(shares))] == BLOCKS[0]
        assert line[shares.index(max(shares))] == BLOCKS[-1]


def test_a_share_is_shown_by_its_median_so_that_one_slow_step_is_not_seen() -> None:
    assert condense([1.0, 1.0, 9.0, 2.0, 2.0, 2.0], 2) == [1.0, 2.0]
    assert sparkline([1.0, 1.0, 9.0, 2.0, 2.0, 2.0], 2) == "▁█"
    assert sparkline([3.0, 3.0], 9) == "▁▁"

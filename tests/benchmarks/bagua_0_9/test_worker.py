"""Buckets as Bagua's service tells them, in names, and as the client cuts them, in counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bagua_0_9.worker import tensor_counts

ORDER = list("abcdef")


@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_a_cut_of_the_order_is_known_by_its_counts(data, counts):
    order = [f"tensor {number}" for number in range(sum(counts))]
    names = iter(order)
    cut = [[next(names) for _ in range(count)] for count in counts]
    told = [data.draw(st.permutations(bucket)) for bucket in cut]
    assert tensor_counts(told, order) == tuple(counts)


@pytest.mark.parametrize(
    "buckets",
    [
        pytest.param(["ab", "df", "ce"], id="not neighbours"),
        pytest.param(["def", "abc"], id="in another order"),
        pytest.param(["ab", "bc", "def"], id="twice"),
    ],
)
def test_buckets_that_are_no_cut_of_the_order_are_refused(buckets):
    with pytest.raises(RuntimeError, match="does not become ready there"):
        tensor_counts([list(bucket) for bucket in buckets], ORDER)


def test_buckets_that_leave_tensors_out_are_refused():
    with pytest.raises(RuntimeError, match="hold 4 tensors of 6"):
        tensor_counts([["a", "b"], ["c", "d"]], ORDER)

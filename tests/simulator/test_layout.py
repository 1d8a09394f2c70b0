"""Cutting: the client's rule, and every tensor in one bucket."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_simulator.simulator import Layouts
from tests.simulator.jobs import CONFIGURATIONS, MIB, SIZES, Knobs, make_tensors

pytestmark = pytest.mark.slow

GROUPS = st.sampled_from([("torch.float32",), ("torch.float32", "torch.bfloat16")])


@given(SIZES, GROUPS, CONFIGURATIONS)
def test_the_buckets_hold_all_bytes_and_the_last_one_ends_with_the_last_tensor(
    sizes: list[int], groups: tuple[str, ...], knobs: Knobs
) -> None:
    tensors = make_tensors(sizes, groups)
    buckets = Layouts(tensors).cut(knobs)
    assert sum(bucket.bytes for bucket in buckets) == sum(tensor.bytes for tensor in tensors)
    lasts = [bucket.last for bucket in buckets]
    assert lasts == sorted(set(lasts))
    assert lasts[-1] == len(tensors) - 1
    assert all(tensors[bucket.last].dtype == bucket.dtype for bucket in buckets)


def test_the_first_and_the_last_bucket_may_be_smaller() -> None:
    layouts = Layouts(make_tensors([MIB // 4] * 20))  # 1 MiB each

    def counts(**knobs: int) -> list[int]:
        ends = [bucket.last + 1 for bucket in layouts.cut({"bucket_bytes": 8 * MIB, **knobs})]
        return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]

    assert counts() == [8, 8, 4]
    assert counts(first_bucket_bytes=MIB) == [1, 8, 8, 3]
    assert counts(last_bucket_bytes=MIB) == [8, 8, 3, 1]
    assert counts(first_bucket_bytes=4 * MIB, last_bucket_bytes=4 * MIB) == [4, 8, 4, 4]


def test_an_explicit_list_is_taken_as_it_is() -> None:
    layouts = Layouts(make_tensors([10, 20, 30, 40]))
    buckets = layouts.cut({"buckets": (1, 3), "bucket_bytes": 1})
    assert [(bucket.bytes, bucket.last) for bucket in buckets] == [(40, 0), (360, 3)]


def test_an_explicit_list_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="hold 3 tensors, but the model has 4"):
        Layouts(make_tensors([1] * 4)).cut({"buckets": (1, 2)})
    mixed = Layouts(make_tensors([1] * 4, ("torch.float32", "torch.bfloat16")))
    with pytest.raises(ValueError, match="mixes groups"):
        mixed.cut({"buckets": (1, 3)})

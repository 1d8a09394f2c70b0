from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_autotune.model.buckets import Tensor, cut

TENSORS = st.lists(st.tuples(st.integers(0, 5000), st.sampled_from("abc")), max_size=60).map(
    lambda sizes: [
        Tensor(name=str(index), elements=size, bytes=size, dtype=group, group=group)
        for index, (size, group) in enumerate(sizes)
    ]
)


@given(TENSORS, st.integers(1, 20_000))
def test_cutting_loses_nothing_and_mixes_nothing(tensors: list[Tensor], size: int) -> None:
    buckets = cut(tensors, size)
    assert sorted(t.name for bucket in buckets for t in bucket) == sorted(t.name for t in tensors)
    for bucket in buckets:
        assert bucket
        assert len({tensor.group for tensor in bucket}) == 1
        positions = [int(tensor.name) for tensor in bucket]
        assert positions == sorted(positions)


@given(TENSORS, st.integers(1, 20_000))
def test_a_bucket_closes_as_soon_as_it_is_full(tensors: list[Tensor], size: int) -> None:
    buckets = cut(tensors, size)
    for bucket in buckets:
        assert sum(tensor.bytes for tensor in bucket[:-1]) < size
    underfull = [b[0].group for b in buckets if sum(tensor.bytes for tensor in b) < size]
    assert len(underfull) == len(set(underfull)), "only the last of a group may be underfull"


def test_groups_come_in_the_order_given() -> None:
    tensors = [
        Tensor(name=str(index), elements=1, bytes=4, dtype=group, group=group)
        for index, group in enumerate(["f32", "f16", "f32"])
    ]
    assert [[t.name for t in b] for b in cut(tensors, 100)] == [["0", "2"], ["1"]]
    assert [[t.name for t in b] for b in cut(tensors, 100, ["f16", "f32", "u8"])] == [
        ["1"],
        ["0", "2"],
    ]
    with pytest.raises(ValueError, match="f32"):
        cut(tensors, 100, ["f16"])

"""The rule that cuts buckets, beside what tests/client/test_layout.py says of it."""

from __future__ import annotations

import pytest

from bagua_autotune.costs import Layouts
from bagua_wire.configuration import Configuration
from bagua_wire.cutting import Cutter, Cutting, Tensor


def cut(tensors: list[Tensor], size: int) -> list[list[Tensor]]:
    buckets = Cutter(tensors).cut(Cutting(size))
    found = [[tensors[position] for position in bucket.positions] for bucket in buckets]
    assert [bucket.bytes for bucket in buckets] == [sum(t.bytes for t in b) for b in found]
    return found


def test_buckets_come_in_the_order_in_which_they_can_start() -> None:
    tensors = [
        Tensor(name=str(index), elements=1, bytes=4, dtype=group, group=group)
        for index, group in enumerate(["f32", "f16", "f32", "f16"])
    ]
    assert [[t.name for t in b] for b in cut(tensors[:3], 100)] == [["1"], ["0", "2"]]
    assert [[t.name for t in b] for b in cut(tensors, 4)] == [["0"], ["1"], ["2"], ["3"]]


def test_sizes_beyond_any_machine_word_are_cut() -> None:
    huge = [
        Tensor(name=str(index), elements=2**53, bytes=2**53, dtype="u8", group="u8")
        for index in range(3000)
    ]
    assert [len(bucket) for bucket in cut(huge, 2**53)] == [1] * 3000
    (whole,) = Cutter(huge).cut(Cutting(explicit=(3000,)))
    assert whole.bytes == 3000 * 2**53
    # As an array too, which is what predictions are made from.
    assert Layouts(huge).cut(Configuration(bucket_bytes=2**53 - 1)).sizes_bytes.sum() > 2**63


@pytest.mark.parametrize("counts", [(1, 1), (2, 2), (3, 0)])
def test_an_explicit_list_must_hold_each_tensor_once(counts: tuple[int, ...]) -> None:
    tensors = [
        Tensor(name=str(index), elements=1, bytes=4, dtype="u8", group="u8") for index in range(3)
    ]
    with pytest.raises(ValueError, match="the model has 3"):
        Cutter(tensors).cut(Cutting(explicit=counts))

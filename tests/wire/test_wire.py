"""The words of both sides: knobs, configurations, sizes, and the rule that cuts buckets (beside
what tests/client/test_layout.py says of it)."""

from __future__ import annotations

import pytest

from bagua_autotune.costs import Layouts
from bagua_wire.configuration import Configuration
from bagua_wire.cutting import Cutter, Cutting, Tensor
from bagua_wire.knob_kinds import describe_bytes
from bagua_wire.knobs import KNOBS
from bagua_wire.words import describe, describe_knob, is_unused


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (65536, "64 KiB"),
        (92682, "90.5 KiB"),
        (1024**2, "1 MiB"),
        (1024**2 - 1, "1 MiB"),
        (25 * 1024**2, "25 MiB"),
        (1000 * 1024**2, "1000 MiB"),
        (2**30, "1 GiB"),
    ],
)
def test_sizes_read_well(size_bytes: int, text: str) -> None:
    assert describe_bytes(size_bytes) == text


def test_configurations_read_as_in_the_summary() -> None:
    text = describe({"bucket_bytes": 4 << 20, "hierarchical": "leaders", "channels": 2})
    assert text == "bucket 4 MiB, hierarchical, 2 channels"
    assert describe({"hierarchical": "off"}) == "flat"


def test_refinements_are_named_only_where_they_are_in_use() -> None:
    unused = {"channels": 1, "first_bucket_bytes": 0, "last_bucket_bytes": 0, "buckets": ()}
    usual = {"bucket_bytes": 25 << 20, "hierarchical": "off", **unused}
    assert describe(usual) == "bucket 25 MiB, flat"
    sized = {**usual, "first_bucket_bytes": 1 << 20, "last_bucket_bytes": 4 << 20}
    assert describe(sized) == "bucket 25 MiB, flat, first bucket 1 MiB, last bucket 4 MiB"
    assert describe({**sized, "buckets": (3, 1)}) == "flat, 2 explicit buckets"


def test_values_that_no_words_are_known_for_are_told_as_they_are() -> None:
    odd = describe({"bucket_bytes": "huge", "hierarchical": 8, "wire": "bf16"})
    assert odd == "bucket huge, hierarchical 8, wire bf16"


def test_what_changes_the_numbers_is_said_wherever_it_is_in_use() -> None:
    said = describe({"bucket_bytes": 4 << 20, "hierarchical": "off", "wire_precision": "bf16"})
    assert said == "bucket 4 MiB, flat, bf16 on the wire (changes the numbers)"
    assert describe({"bucket_bytes": 4 << 20, "wire_precision": "as_is"}) == "bucket 4 MiB"


def test_equal_configurations_are_one_key_whatever_their_order() -> None:
    first = Configuration(bucket_bytes=1, hierarchical="off")
    second = Configuration({"hierarchical": "off", "bucket_bytes": 1})
    assert first == second
    assert {first: "found"}[second] == "found"
    assert first != Configuration(bucket_bytes=2, hierarchical="off")


def test_a_list_of_buckets_may_come_as_json_has_it() -> None:
    from_json = Configuration({"bucket_bytes": 1, "buckets": [3, 1]})  # type: ignore[dict-item]
    assert from_json == Configuration(bucket_bytes=1, buckets=(3, 1))
    assert hash(from_json) == hash(Configuration(bucket_bytes=1, buckets=(3, 1)))


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


OTHERS = {
    "bucket_bytes": [4096],
    "buckets": [(3,), (3, 1)],
    "algorithm": ["bytegrad", "powersgd"],
    "kept_units": [1, 12],
    "prefetch_bytes": [4096],
    "recomputed_blocks": [0, 12],
}


@pytest.mark.parametrize("knob", KNOBS.values(), ids=list(KNOBS))
def test_a_knob_reads_the_same_on_both_sides(knob) -> None:  # type: ignore[no-untyped-def]
    values = [*knob.kind.tried, *OTHERS.get(knob.name, [])]
    for value in values:
        if value == knob.default and is_unused(knob.name, value):
            continue  # Neither side says anything.
        assert describe_knob(knob.name, value) == knob.told(value)
        assert not is_unused(knob.name, value)
    assert values

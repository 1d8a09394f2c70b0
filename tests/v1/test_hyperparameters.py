"""Buckets by Bagua's rule, and the translation between its words and ours."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_v1.hyperparameters import (
    ELEMENT_BYTES,
    UNBUCKETED_BYTES,
    UNBUCKETED_WIRE_BYTES,
    baseline,
    in_execution_order,
    space,
    tensor,
    to_configuration,
    to_wire,
)

pytestmark = pytest.mark.slow

MIB = 1024**2
names = st.text("abcdefgh.", min_size=1, max_size=6)
tensor_lists = st.lists(
    st.tuples(names, st.integers(0, 1_000_000), st.sampled_from(sorted(ELEMENT_BYTES))),
    min_size=1,
    max_size=40,
    unique_by=lambda item: item[0],
).map(lambda items: [tensor(*item) for item in items])


def wire_names(wire: dict[str, Any]) -> list[list[str]]:
    return [[member["name"] for member in bucket] for bucket in wire["buckets"]]


@given(
    tensors=tensor_lists,
    order=st.lists(names, unique=True),
    bucket_bytes=st.integers(1, 2**31),
)
def test_every_tensor_is_in_exactly_one_bucket_by_the_rule(tensors, order, bucket_bytes):
    ordered = in_execution_order(tensors, order)
    buckets = to_wire(ordered, baseline(bucket_bytes))["buckets"]

    flat = [member for bucket in buckets for member in bucket]
    assert sorted(member["name"] for member in flat) == sorted(t.name for t in tensors)
    assert [member["dtype"] for member in flat] == sorted(member["dtype"] for member in flat)
    for position, bucket in enumerate(buckets):
        (dtype,) = {member["dtype"] for member in bucket}
        sizes = [member["num_elements"] * ELEMENT_BYTES[dtype] for member in bucket]
        assert sum(sizes[:-1]) < bucket_bytes
        is_last_of_dtype = buckets[position + 1 :][:1] == [] or (
            buckets[position + 1][0]["dtype"] != dtype
        )
        assert is_last_of_dtype or sum(sizes) >= bucket_bytes
        rank = {t.name: index for index, t in enumerate(ordered)}
        places = [rank[member["name"]] for member in bucket]
        assert places == sorted(places)


def test_tensors_follow_the_spans_and_unknown_ones_come_first():
    tensors = [tensor(name, 1, "f32") for name in "abcd"]
    assert [t.name for t in in_execution_order(tensors, ["d", "x", "b"])] == ["a", "c", "d", "b"]


def test_hyperparameters_have_bagua_s_names_and_types():
    tensors = [tensor("w", 3 * MIB, "f32"), tensor("h", 8, "f16"), tensor("n", 1, "i64")]
    assert to_wire(tensors, to_configuration(4 * MIB, True)) == {
        "buckets": [
            [{"name": "h", "num_elements": 8, "dtype": "f16"}],
            [{"name": "w", "num_elements": 3 * MIB, "dtype": "f32"}],
            [{"name": "n", "num_elements": 1, "dtype": "i64"}],
        ],
        "bucket_size": 4 * MIB,
        "is_hierarchical_reduce": True,
    }


def test_a_model_that_is_not_bucketed_is_one_bucket_of_each_dtype():
    tensors = [tensor(f"w{i}", 512 * MIB, "f32") for i in range(4)]
    wire = to_wire(tensors, baseline(UNBUCKETED_BYTES))
    assert wire_names(wire) == [["w0", "w1", "w2", "w3"]]
    assert wire["bucket_size"] == UNBUCKETED_WIRE_BYTES
    assert to_configuration(UNBUCKETED_WIRE_BYTES, False) == baseline(UNBUCKETED_BYTES)


@given(st.integers(1, UNBUCKETED_BYTES))
def test_the_default_is_always_in_the_domain(bucket_bytes):
    knobs = space(bucket_bytes)
    assert all(knobs[knob].contains(value) for knob, value in baseline(bucket_bytes).items())

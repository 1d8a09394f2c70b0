"""Buckets by Bagua's rule, and the translation between its words and ours."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_autotune.measuring.against_default import LARGEST_SPEED
from bagua_autotune.model.job import Observation
from bagua_v1.directory import family_key, stem
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
from bagua_v1.tuning import are_enough, comparable

pytestmark = pytest.mark.slow


MIB = 1024**2
names = st.text("abcdefgh.", min_size=1, max_size=6)
tensor_lists = st.lists(
    st.tuples(names, st.integers(0, 1_000_000), st.sampled_from(sorted(ELEMENT_BYTES))),
    min_size=1,
    max_size=20,
    unique_by=lambda item: item[0],
).map(lambda items: [tensor(*item) for item in items])


def wire_names(wire: dict[str, Any]) -> list[list[str]]:
    return [[member["name"] for member in bucket] for bucket in wire["buckets"]]


@given(tensors=tensor_lists, order=st.lists(names, unique=True), bucket_bytes=st.integers(1, 2**31))
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


@pytest.mark.parametrize(
    ("model_name", "expected"),
    [
        ("DistributedDataParallel_V1_9_0_140234234234234", "DistributedDataParallel_V1_9_0"),
        ("Net_94512345678912", "Net"),
        ("Net_548123456789", "Net"),
        ("resnet_50", "resnet_50"),
        ("run_1700000000", "run_1700000000"),
        ("run_20240131120000123", "run_20240131120000123"),
        ("run_012345678901", "run_012345678901"),
        ("bert_20240131", "bert_20240131"),
        ("_140234234234234", "_140234234234234"),
        ("140234234234234", "140234234234234"),
    ],
)
def test_only_an_address_is_cut_off(model_name, expected):
    assert stem(model_name) == expected


def test_this_process_s_addresses_are_recognised():
    class Net: ...

    assert stem(f"Net_{id(Net())}") == "Net"


def test_a_family_is_the_stem_the_tensors_in_any_order_and_what_it_is_tuned_with():
    a, b = tensor("a", 1, "f32"), tensor("b", 2, "f16")

    def key(name="Net_140234234230000", tensors=(a, b), world_size=2, default_bytes=10):
        return family_key(name, tensors, world_size, default_bytes)

    assert key() == key("Net_140234999999999", (b, a)) == key("Net")
    others = [
        key("Other_140234234230000"),
        key(tensors=[a]),
        key(tensors=[a, tensor("b", 2, "u8")]),
        key(world_size=4),
        key(world_size=None),
        key(default_bytes=11),
    ]
    assert len({key(), *others}) == 7


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

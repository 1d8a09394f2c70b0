"""Cutting a tensor list into buckets."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from bagua_client.buckets.layout import TensorSpec, cut, describe, digest_of, plan
from bagua_client.configuration import Configuration

DTYPES = {"torch.float32": 4, "torch.bfloat16": 2, "torch.float64": 8}


@st.composite
def ordered_tensors(draw: st.DrawFn) -> tuple[list[TensorSpec], list[int]]:
    """Tensors of several dtypes and devices, and the order in which they become ready."""
    kinds = draw(
        st.lists(
            st.tuples(st.integers(0, 2000), st.sampled_from(sorted(DTYPES)), st.sampled_from("01")),
            min_size=1,
            max_size=30,
        )
    )
    tensors = [
        TensorSpec(f"t{index}", (elements,), DTYPES[dtype], dtype, f"cuda#{device}")
        for index, (elements, dtype, device) in enumerate(kinds)
    ]
    return tensors, draw(st.permutations(range(len(tensors))))


@given(case=ordered_tensors(), bucket_bytes=st.integers(1, 20_000))
def test_cut_takes_every_tensor_once_in_order_and_closes_full_buckets(
    case: tuple[list[TensorSpec], list[int]], bucket_bytes: int
) -> None:
    tensors, order = case
    buckets = cut(tensors, order, bucket_bytes)

    assert sorted(index for bucket in buckets for index in bucket) == sorted(order)
    place = {index: at for at, index in enumerate(order)}
    assert all(list(bucket) == sorted(bucket, key=place.__getitem__) for bucket in buckets)
    last = [place[bucket[-1]] for bucket in buckets]
    assert last == sorted(last), "buckets start in the order in which they become full"

    for group in {tensor.group for tensor in tensors}:
        of_group = [bucket for bucket in buckets if tensors[bucket[0]].group == group]
        assert all(tensors[index].group == group for bucket in of_group for index in bucket)
        in_order = [index for bucket in of_group for index in bucket]
        assert in_order == sorted(in_order, key=place.__getitem__)
        for bucket in of_group:
            assert sum(tensors[index].bytes for index in bucket[:-1]) < bucket_bytes
        for bucket in of_group[:-1]:
            assert sum(tensors[index].bytes for index in bucket) >= bucket_bytes


@given(case=ordered_tensors(), bucket_bytes=st.integers(1, 20_000))
def test_equal_plans_have_equal_digests_and_other_plans_other_ones(
    case: tuple[list[TensorSpec], list[int]], bucket_bytes: int
) -> None:
    tensors, order = case
    layout = plan(tensors, order, Configuration(bucket_bytes))
    assert layout.digest == plan(list(tensors), tuple(order), Configuration(bucket_bytes)).digest
    others = [
        plan(tensors, order, Configuration(bucket_bytes + 1)),
        plan(tensors, order, Configuration(bucket_bytes, "leaders")),
        plan(
            [*tensors, TensorSpec("more", (1,), 4, "torch.float32", "cpu#0")],
            order,
            Configuration(1),
        ),
    ]
    assert layout.digest not in [other.digest for other in others]


def test_the_order_alone_changes_the_digest() -> None:
    tensors = describe([("a", torch.zeros(3)), ("b", torch.zeros(3))])
    one_bucket = Configuration(bucket_bytes=1000)
    assert plan(tensors, [0, 1], one_bucket).digest != plan(tensors, [1, 0], one_bucket).digest


def test_tensors_are_described_the_same_whatever_device_index_the_rank_uses() -> None:
    (spec,) = describe([("weight", torch.zeros(3, 5, dtype=torch.bfloat16))])
    assert spec == TensorSpec("weight", (3, 5), 2, "torch.bfloat16", "cpu#0")
    assert spec.bytes == 30


@given(values=st.lists(st.integers() | st.text()))
def test_a_digest_fits_an_int64_and_is_never_the_vote_for_cannot(values: list[object]) -> None:
    assert 0 < digest_of(values) < 2**63

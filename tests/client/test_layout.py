"""Cutting a tensor list into buckets."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagua_client.configuration import Configuration
from bagua_client.layout import Partition, TensorSpec, cut, describe, digest_of, plan

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


@st.composite
def explicit(draw: st.DrawFn) -> tuple[list[TensorSpec], list[int], tuple[int, ...]]:
    """Tensors, their order, and explicit buckets that fit them."""
    tensors, order = draw(ordered_tensors())
    counts = [1]
    for before, index in pairwise(order):
        if tensors[before].group == tensors[index].group and draw(st.booleans()):
            counts[-1] += 1
        else:
            counts.append(1)
    return tensors, order, tuple(counts)


def by_group(tensors: list[TensorSpec], buckets: Partition) -> list[list[list[int]]]:
    """For each group the bytes of the tensors of each of its buckets."""
    groups: dict[str, list[list[int]]] = {}
    for bucket in buckets:
        (group,) = {tensors[index].group for index in bucket}
        groups.setdefault(group, []).append([tensors[index].bytes for index in bucket])
    return list(groups.values())


def check_order(tensors: list[TensorSpec], order: list[int], buckets: Partition) -> None:
    """Each tensor is in one bucket; all stands in the order of readiness."""
    place = {index: at for at, index in enumerate(order)}
    assert sorted(index for bucket in buckets for index in bucket) == sorted(order)
    last = [place[bucket[-1]] for bucket in buckets]
    assert last == sorted(last), "buckets start in the order in which they become full"
    for group in {tensor.group for tensor in tensors}:
        # Of one group the buckets follow one another without a gap.
        cut_in_order = [i for bucket in buckets for i in bucket if tensors[i].group == group]
        assert cut_in_order == [index for index in order if tensors[index].group == group]


@given(
    case=ordered_tensors(),
    bucket_bytes=st.integers(1, 20_000),
    first_bytes=st.just(0) | st.integers(0, 10_000),
    last_bytes=st.just(0) | st.integers(0, 10_000),
)
def test_buckets_are_closed_when_full_and_a_groups_first_and_last_may_be_smaller(
    case: tuple[list[TensorSpec], list[int]], bucket_bytes: int, first_bytes: int, last_bytes: int
) -> None:
    tensors, order = case
    configuration = Configuration(
        bucket_bytes, first_bucket_bytes=first_bytes, last_bucket_bytes=last_bytes
    )
    buckets = cut(tensors, order, configuration)
    check_order(tensors, order, buckets)
    first_limit = min(first_bytes or bucket_bytes, bucket_bytes)
    last_limit = min(last_bytes, bucket_bytes)
    for sizes in by_group(tensors, buckets):
        if last_limit:
            *sizes, last = sizes
            assert sum(last[1:]) < last_limit, "the fewest tensors"
            assert sum(last) >= last_limit or not sizes
        # What comes before is cut as if the last bucket were not there.
        limits = [first_limit, *[bucket_bytes] * len(sizes)]
        assert all(sum(b[:-1]) < limit for b, limit in zip(sizes, limits, strict=False))
        assert all(sum(b) >= limit for b, limit in zip(sizes[:-1], limits, strict=False))


@given(case=explicit())
def test_explicit_buckets_are_taken_as_they_are(
    case: tuple[list[TensorSpec], list[int], tuple[int, ...]],
) -> None:
    tensors, order, counts = case
    layout = plan(tensors, order, Configuration(1, buckets=counts))
    check_order(tensors, order, layout.partition)
    assert tuple(len(bucket) for bucket in layout.partition) == counts
    assert [index for bucket in layout.partition for index in bucket] == order
    other = plan(tensors, order, Configuration(1))
    assert other.digest != layout.digest, "even where the buckets are the same"


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((4,), "explicit bucket 0 mixes tensors of torch.bfloat16/cpu#0 and torch.float32/cpu#0"),
        ((2, 1, 1), "explicit bucket 0 mixes"),
        ((1, 2), "hold 3 tensors, but the model has 4"),
        ((1, 3, 1), "hold 5 tensors, but the model has 4"),
        ((10**18,), "hold 1000000000000000000 tensors"),
    ],
)
def test_explicit_buckets_that_do_not_fit_are_refused_in_words(
    counts: tuple[int, ...], message: str
) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.bfloat16, torch.bfloat16]
    tensors = describe([(f"t{i}", torch.zeros(3, dtype=d)) for i, d in enumerate(dtypes)])
    with pytest.raises(ValueError, match=message):
        plan(tensors, range(4), Configuration(buckets=counts))
    assert plan(tensors, range(4), Configuration(buckets=(1, 3))).partition == ((0,), (1, 2, 3))


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
        plan(tensors, order, Configuration(bucket_bytes, channels=2)),
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

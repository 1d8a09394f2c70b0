from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from bagua_autotune.costs import Cost, CostModel, Kind, Layouts
from bagua_autotune.model.buckets import Tensor, cut
from bagua_autotune.model.knobs import (
    Categorical,
    Configuration,
    LogInteger,
    Partition,
    check_configuration,
)
from bagua_autotune.search.candidates import enumerate_candidates, explicit_candidates
from tests.autotune.support import MIB, make_spec

SPEC = make_spec()


def tensors(sizes: list[int]) -> list[Tensor]:
    return [
        Tensor(name=str(i), elements=size, bytes=size, dtype="u8", group="u8/cpu")
        for i, size in enumerate(sizes)
    ]


@given(
    st.lists(st.integers(0, 3 * MIB), min_size=1, max_size=40),
    st.integers(65536, 64 * MIB),
    st.sampled_from(["off", "leaders"]),
)
def test_candidates_are_valid_distinct_and_led_by_the_baseline(
    sizes: list[int], baseline_bytes: int, level: str
) -> None:
    baseline = Configuration(bucket_bytes=baseline_bytes, hierarchical=level)
    found = enumerate_candidates(SPEC.knobs, baseline, tensors(sizes))
    assert found[0] == baseline
    assert len(set(found)) == len(found)
    for candidate in found:
        check_configuration(candidate, SPEC.knobs)
    for other in ("off", "leaders"):
        layouts = [
            tuple(map(len, cut(tensors(sizes), int(candidate["bucket_bytes"]))))
            for candidate in found
            if candidate["hierarchical"] == other
        ]
        assert layouts
        assert len(found) <= math.prod(domain.choices for domain in SPEC.knobs.values())
        assert len(set(layouts)) == len(layouts), "two candidates cut the same buckets"


def test_sizes_that_differ_are_all_there() -> None:
    baseline = Configuration(SPEC.default_configuration)
    found = enumerate_candidates(SPEC.knobs, baseline, SPEC.tensors)
    sizes = sorted({int(candidate["bucket_bytes"]) for candidate in found})
    assert {1 * MIB, 4 * MIB, 16 * MIB, 25 * MIB, 64 * MIB} <= set(sizes)
    # 100 MB of gradients: of the sizes that make one bucket of all, one is enough.
    assert sizes[-1] == 128 * MIB
    assert len(found) == 2 * len(sizes)


def test_a_model_of_one_tensor_leaves_one_candidate() -> None:
    space = {
        "bucket_bytes": LogInteger(low=65536, high=2**30),
        "hierarchical": Categorical(values=("off",)),
    }
    baseline = Configuration(bucket_bytes=25 * MIB, hierarchical="off")
    assert enumerate_candidates(space, baseline, tensors([1000])) == (baseline,)


EVERY_KNOB = {
    "bucket_bytes": LogInteger(low=65536, high=2**30),
    "hierarchical": Categorical(values=("off", "leaders", "shards")),
    "channels": Categorical(values=(1, 2, 4)),
    "first_bucket_bytes": Categorical(values=(0, MIB, 4 * MIB)),
    "last_bucket_bytes": Categorical(values=(0, MIB, 4 * MIB)),
    "buckets": Partition(),
}
DEFAULT = Configuration(
    bucket_bytes=25 * MIB,
    hierarchical="off",
    channels=1,
    first_bucket_bytes=0,
    last_bucket_bytes=0,
    buckets=(),
)


def test_a_first_bucket_that_is_no_smaller_than_the_others_is_not_tried() -> None:
    found = enumerate_candidates(EVERY_KNOB, DEFAULT, tensors([100_000] * 300))
    firsts = {(c.number("bucket_bytes"), c.number("first_bucket_bytes")) for c in found}
    assert (MIB // 2, MIB) not in firsts
    assert (MIB, MIB) not in firsts
    assert {(2 * MIB, MIB), (8 * MIB, 4 * MIB), (MIB, 0)} <= firsts


def test_a_knob_for_lists_adds_none_before_a_model_is_known() -> None:
    found = enumerate_candidates(EVERY_KNOB, DEFAULT, tensors([100_000] * 300))
    assert all(candidate["buckets"] == () for candidate in found)
    for candidate in found:
        check_configuration(candidate, EVERY_KNOB)


def make_model(members: list[Tensor]) -> CostModel:
    ready = [0.1 + 0.001 * place for place in range(len(members))]
    costs = {
        Kind(way, channels, precision): Cost(1e-3, 1e-9)
        for way in ("off", "leaders", "shards")
        for channels in (1, 2)
        for precision in ("as_is", "bf16")
    }
    return CostModel(Layouts(members), ready, costs)


@given(st.lists(st.integers(0, 3 * MIB), min_size=1, max_size=40))
def test_one_explicit_list_is_offered_for_each_way_to_reduce(sizes: list[int]) -> None:
    members = tensors(sizes)
    found = explicit_candidates(EVERY_KNOB, DEFAULT, members, make_model(members))
    assert [candidate["hierarchical"] for candidate in found] == ["off", "leaders", "shards"]
    for candidate in found:
        check_configuration(candidate, EVERY_KNOB)
        counts = candidate["buckets"]
        assert isinstance(counts, tuple)
        assert sum(counts) == len(sizes)
        others = ("channels", "first_bucket_bytes", "last_bucket_bytes")
        assert all(candidate[knob] == DEFAULT[knob] for knob in others)


def test_no_explicit_list_is_offered_where_none_can_hold_all_tensors() -> None:
    mixed = [Tensor(name=group, elements=10, bytes=10, dtype="u8", group=group) for group in "abab"]
    assert explicit_candidates(EVERY_KNOB, DEFAULT, mixed, make_model(mixed)) == []

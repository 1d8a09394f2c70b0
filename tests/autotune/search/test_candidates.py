from __future__ import annotations

import math
import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bagua_autotune.costs import Cost, CostModel, Kind, Layouts
from bagua_autotune.model.knobs import (
    Categorical,
    LogInteger,
    Partition,
    Space,
    check_configuration,
)
from bagua_autotune.search.candidates import enumerate_candidates, explicit_candidates
from bagua_wire.configuration import Configuration
from bagua_wire.cutting import Cutter, Cutting, Tensor
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
    cutter = Cutter(tensors(sizes))
    for other in ("off", "leaders"):
        layouts = [
            tuple(len(bucket.positions) for bucket in cutter.cut(Cutting.of(candidate)))
            for candidate in found
            if candidate["hierarchical"] == other
        ]
        assert layouts
        assert len(found) <= math.prod(domain.choices for domain in SPEC.knobs.values())
        assert len(set(layouts)) == len(layouts), "two candidates cut the same buckets"


def test_candidates_of_many_buckets_take_little_memory() -> None:
    """They were told apart by their buckets themselves: 64 KB for each of these."""
    values = {f"knob{number}": Categorical(values=tuple(range(16))) for number in range(2)}
    space: Space = {"bucket_bytes": LogInteger(low=65536, high=MIB), **values}
    baseline = Configuration(bucket_bytes=MIB, knob0=0, knob1=0)
    many = tensors([MIB] * 4000)
    tracemalloc.start()
    found = enumerate_candidates(space, baseline, many)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found) == 256
    assert peak_bytes < 8 * MIB


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


EVERY_KNOB: Space = {
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


def test_one_unit_of_a_sharded_model_travels_in_stripes_and_one_bucket_in_parts() -> None:
    size = LogInteger(low=768 * 1024, high=768 * 1024)
    space: Space = {"bucket_bytes": size, "channels": Categorical(values=(1, 2, 4, 8))}
    default, one = Configuration(bucket_bytes=768 * 1024, channels=1), tensors([768 * 1024])

    def channels(is_striped: bool) -> list[int]:
        found = enumerate_candidates(space, default, one, is_striped)
        return [each.number("channels") for each in found]

    assert channels(is_striped=False) == [1]
    assert channels(is_striped=True) == [1, 2, 4, 8]


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


def explicit_of(
    members: list[Tensor], default: Configuration = DEFAULT, space: Space = EVERY_KNOB
) -> list[Configuration]:
    candidates = enumerate_candidates(space, default, members)
    return explicit_candidates(space, default, candidates, Layouts(members), make_model(members))


FEW_SIZES: Space = {**EVERY_KNOB, "bucket_bytes": LogInteger(low=MIB, high=32 * MIB)}


@example([20_000, 56_580, 0, 0], 1).via("more buckets than any size cuts")
@given(st.lists(st.integers(0, 3 * MIB), min_size=1, max_size=40), st.sampled_from([1, 2, 4]))
def test_explicit_lists_are_others_than_sizes_can_cut_at_most_one_for_each_way_to_reduce(
    sizes: list[int], channels: int
) -> None:
    members = tensors(sizes)
    default = Configuration({**DEFAULT, "channels": channels})
    found = explicit_of(members, default, FEW_SIZES)
    ways = [candidate["hierarchical"] for candidate in found]
    assert ways == [way for way in ("off", "leaders", "shards") if way in ways]
    layouts = Layouts(members)
    by_size = {
        tuple(layouts.cut(candidate).last)
        for candidate in enumerate_candidates(FEW_SIZES, default, members)
    }
    for candidate in found:
        check_configuration(candidate, FEW_SIZES)
        counts = candidate["buckets"]
        assert isinstance(counts, tuple)
        assert sum(counts) == len(sizes)
        assert candidate["channels"] == 1, "for which the list was found"
        assert tuple(layouts.cut(candidate).last) not in by_size
        for knob in ("first_bucket_bytes", "last_bucket_bytes"):
            assert candidate[knob] == DEFAULT[knob]


def test_one_explicit_list_is_offered_for_each_way_to_reduce() -> None:
    # Half-powers of two cut these at other places than where the model wants it.
    found = explicit_of(tensors([700_000 + 1000 * place for place in range(40)]))
    assert [candidate["hierarchical"] for candidate in found] == ["off", "leaders", "shards"]


@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("count", [1, 2])
def test_tensors_too_few_for_another_cut_leave_no_explicit_list(count: int, channels: int) -> None:
    members = tensors([32 * MIB] * count)
    assert explicit_of(members, Configuration({**DEFAULT, "channels": channels})) == []


def test_no_explicit_list_is_offered_where_none_can_hold_all_tensors() -> None:
    mixed = [Tensor(name=group, elements=10, bytes=10, dtype="u8", group=group) for group in "abab"]
    assert explicit_of(mixed) == []

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from bagua_autotune.model.buckets import Tensor, cut
from bagua_autotune.model.knobs import (
    Categorical,
    Configuration,
    LogInteger,
    check_configuration,
)
from bagua_autotune.search.candidates import enumerate_candidates
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

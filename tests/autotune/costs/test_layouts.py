"""The predictions' buckets are the very ones that the ranks will make."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bagua_autotune.costs import Layouts
from bagua_client.configuration import Configuration as ClientConfiguration
from bagua_client.layout import TensorSpec, plan
from bagua_wire.configuration import Configuration
from bagua_wire.cutting import Tensor

Kinds = list[tuple[int, str]]
KINDS = st.lists(
    st.tuples(st.integers(0, 60), st.sampled_from(["float32", "bfloat16", "uint8"])),
    min_size=1,
    max_size=40,
)
SIZES = st.integers(0, 200)


def tensors(kinds: Kinds) -> list[Tensor]:
    return [
        Tensor(name=str(place), elements=size, bytes=size, dtype=dtype, group=f"{dtype}/cpu#0")
        for place, (size, dtype) in enumerate(kinds)
    ]


@st.composite
def configurations(draw: st.DrawFn, kinds: Kinds) -> Configuration:
    counts = [1]
    for before, after in pairwise(kinds):
        if before[1] == after[1] and draw(st.booleans()):
            counts[-1] += 1
        else:
            counts.append(1)
    return Configuration(
        bucket_bytes=draw(st.integers(1, 300)),
        first_bucket_bytes=draw(SIZES),
        last_bucket_bytes=draw(SIZES),
        buckets=tuple(counts) if draw(st.booleans()) else (),
        channels=draw(st.sampled_from([1, 2, 4])),
    )


def made_by_client(kinds: Kinds, configuration: Configuration) -> list[tuple[int, int]]:
    """For each bucket of the client its bytes and the position of its last tensor."""
    specs = [
        TensorSpec(str(i), (size,), 1, dtype, "cpu#0") for i, (size, dtype) in enumerate(kinds)
    ]
    layout = plan(specs, range(len(specs)), ClientConfiguration.from_json(configuration))
    return [(sum(specs[i].bytes for i in bucket), bucket[-1]) for bucket in layout.partition]


@given(st.data(), KINDS)
def test_the_client_makes_the_buckets_that_are_predicted(data: st.DataObject, kinds: Kinds) -> None:
    configuration = data.draw(configurations(kinds))
    layout = Layouts(tensors(kinds)).cut(configuration)
    found = list(zip(layout.sizes_bytes.tolist(), layout.last.tolist(), strict=True))
    assert found == made_by_client(kinds, configuration)


@given(st.data(), KINDS)
def test_the_layouts_of_many_configurations_stand_side_by_side(
    data: st.DataObject, kinds: Kinds
) -> None:
    chosen = data.draw(st.lists(configurations(kinds), min_size=1, max_size=6))
    table = Layouts(tensors(kinds)).table(chosen)
    for place, configuration in enumerate(chosen):
        row = table.row_of[place]
        there = table.is_bucket[row]
        found = zip(table.sizes_bytes[row][there], table.last[row][there], strict=True)
        assert [(int(size), int(last)) for size, last in found] == made_by_client(
            kinds, configuration
        )
        assert not table.sizes_bytes[row][~there].any()
        # What is there stands first.
        assert (np.diff(there.astype(int)) <= 0).all()


def test_knobs_that_a_job_does_not_have_are_at_their_defaults() -> None:
    kinds: Kinds = [(10, "float32")] * 10
    layout = Layouts(tensors(kinds)).cut(Configuration(bucket_bytes=40))
    assert layout.sizes_bytes.tolist() == [40, 40, 20]
    assert layout.last.tolist() == [3, 7, 9]

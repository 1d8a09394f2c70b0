"""Kinds of collectives: their names in the store, and which a job can have."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bagua_autotune.costs import Kind, kinds_of
from bagua_autotune.model.knobs import Categorical, LogInteger, Space
from bagua_wire.configuration import Configuration

VALUES = st.text(max_size=20) | st.integers(0, 2**53)


@given(VALUES, VALUES, VALUES)
def test_a_kind_comes_out_of_the_store_as_it_went_in(
    hierarchical: int | str, channels: int | str, wire_precision: int | str
) -> None:
    kind = Kind(hierarchical, channels, wire_precision)
    assert Kind.parse(kind.key) == kind


SPACE: Space = {
    "bucket_bytes": LogInteger(low=65536, high=2**30),
    "hierarchical": Categorical(values=("off", "leaders")),
    "channels": Categorical(values=(1, 2)),
}


def test_a_space_has_every_kind_that_its_knobs_make_each_once() -> None:
    default = Configuration(bucket_bytes=65536, hierarchical="off", channels=2)
    kinds = kinds_of(SPACE, [default])
    assert len(kinds) == len(set(kinds))
    assert set(kinds) == {Kind(way, count) for way in ("off", "leaders") for count in (1, 2)}


def test_a_configuration_from_outside_the_space_adds_its_kind() -> None:
    other = Configuration(bucket_bytes=65536, hierarchical="shards", channels=4)
    assert Kind("shards", 4) in kinds_of(SPACE, [Configuration(bucket_bytes=65536), other])

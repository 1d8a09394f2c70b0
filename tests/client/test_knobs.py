"""Client and service have a list of words each; a knob reads the same in both."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_autotune.model.knobs import LOSSLESS_KNOBS
from bagua_autotune.model.text import KNOB_WORDS, describe_bytes, describe_knob, is_unused
from bagua_client.knob_kinds import size_in_words
from bagua_client.knobs import KNOBS

OTHERS = {
    "bucket_bytes": [4096],
    "buckets": [(3,), (3, 1)],
    "algorithm": ["bytegrad", "powersgd"],
    "kept_units": [1, 12],
    "prefetch_bytes": [4096],
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


def test_both_know_the_same_knobs() -> None:
    assert set(KNOB_WORDS) == set(KNOBS)
    assert set(LOSSLESS_KNOBS) == {k.name for k in KNOBS.values() if not k.changes_numbers}


@given(st.integers(1, 2**40))
def test_a_size_reads_the_same_on_both_sides(size_bytes: int) -> None:
    assert size_in_words(size_bytes) == describe_bytes(size_bytes)

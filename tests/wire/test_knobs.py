"""A knob reads the same in what the client says and in what the service says."""

from __future__ import annotations

import pytest

from bagua_wire.knobs import KNOBS
from bagua_wire.words import describe_knob, is_unused

OTHERS = {
    "bucket_bytes": [4096],
    "buckets": [(3,), (3, 1)],
    "algorithm": ["bytegrad", "powersgd"],
    "kept_units": [1, 12],
    "prefetch_bytes": [4096],
    "recomputed_blocks": [0, 12],
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

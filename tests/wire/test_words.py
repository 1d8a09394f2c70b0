"""Configurations and sizes in the words that people read."""

from __future__ import annotations

import pytest

from bagua_wire.knob_kinds import describe_bytes
from bagua_wire.words import describe


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (65536, "64 KiB"),
        (92682, "90.5 KiB"),
        (1024**2, "1 MiB"),
        (1024**2 - 1, "1 MiB"),
        (25 * 1024**2, "25 MiB"),
        (1000 * 1024**2, "1000 MiB"),
        (2**30, "1 GiB"),
    ],
)
def test_sizes_read_well(size_bytes: int, text: str) -> None:
    assert describe_bytes(size_bytes) == text


def test_configurations_read_as_in_the_summary() -> None:
    text = describe({"bucket_bytes": 4 << 20, "hierarchical": "leaders", "channels": 2})
    assert text == "bucket 4 MiB, hierarchical, 2 channels"
    assert describe({"hierarchical": "off"}) == "flat"


def test_refinements_are_named_only_where_they_are_in_use() -> None:
    unused = {"channels": 1, "first_bucket_bytes": 0, "last_bucket_bytes": 0, "buckets": ()}
    usual = {"bucket_bytes": 25 << 20, "hierarchical": "off", **unused}
    assert describe(usual) == "bucket 25 MiB, flat"
    sized = {**usual, "first_bucket_bytes": 1 << 20, "last_bucket_bytes": 4 << 20}
    assert describe(sized) == "bucket 25 MiB, flat, first bucket 1 MiB, last bucket 4 MiB"
    assert describe({**sized, "buckets": (3, 1)}) == "flat, 2 explicit buckets"


def test_values_that_no_words_are_known_for_are_told_as_they_are() -> None:
    odd = describe({"bucket_bytes": "huge", "hierarchical": 8, "wire": "bf16"})
    assert odd == "bucket huge, hierarchical 8, wire bf16"


def test_what_changes_the_numbers_is_said_wherever_it_is_in_use() -> None:
    said = describe({"bucket_bytes": 4 << 20, "hierarchical": "off", "wire_precision": "bf16"})
    assert said == "bucket 4 MiB, flat, bf16 on the wire (changes the numbers)"
    assert describe({"bucket_bytes": 4 << 20, "wire_precision": "as_is"}) == "bucket 4 MiB"

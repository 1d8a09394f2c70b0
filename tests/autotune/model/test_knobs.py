from __future__ import annotations

import pytest

from bagua_autotune.model.characters import clean
from bagua_autotune.model.knobs import (
    SPACE as SPACES,
)
from bagua_autotune.model.knobs import Categorical, LogInteger, Partition, check_configuration
from bagua_wire.configuration import Configuration, Value
from bagua_wire.knob_kinds import describe_bytes
from bagua_wire.words import describe

SPACE = {
    "bucket_bytes": LogInteger(low=65536, high=2**30),
    "hierarchical": Categorical(values=("off", "leaders")),
}


def test_a_configuration_of_the_domains_passes() -> None:
    check_configuration({"bucket_bytes": 65536, "hierarchical": "leaders"}, SPACE)


@pytest.mark.parametrize(
    ("configuration", "knob"),
    [
        ({"bucket_bytes": 65535, "hierarchical": "off"}, "bucket_bytes"),
        ({"bucket_bytes": True, "hierarchical": "off"}, "bucket_bytes"),
        ({"bucket_bytes": "65536", "hierarchical": "off"}, "bucket_bytes"),
        ({"bucket_bytes": 65536, "hierarchical": "shards"}, "hierarchical"),
        ({"bucket_bytes": 65536}, "hierarchical"),
        ({"bucket_bytes": 65536, "hierarchical": "off", "channels": 2}, "channels"),
    ],
)
def test_the_message_names_the_knob_at_fault(configuration: dict, knob: str) -> None:
    with pytest.raises(ValueError, match=knob):
        check_configuration(configuration, SPACE)


def test_domains_refuse_nonsense() -> None:
    with pytest.raises(ValueError, match="above high"):
        LogInteger(low=2, high=1)
    with pytest.raises(ValueError, match="twice"):
        Categorical(values=("off", "off"))
    for unprintable in ("\x1b[31mred", "a\nb", "a\tb", "a\x00"):
        with pytest.raises(ValueError, match="cannot be printed"):
            Categorical(values=("off", unprintable))


def test_equal_configurations_are_one_key_whatever_their_order() -> None:
    first = Configuration(bucket_bytes=1, hierarchical="off")
    second = Configuration({"hierarchical": "off", "bucket_bytes": 1})
    assert first == second
    assert {first: "found"}[second] == "found"
    assert first != Configuration(bucket_bytes=2, hierarchical="off")


def test_lists_of_buckets_and_numbers_as_choices_are_told_from_nonsense() -> None:
    space = {**SPACE, "channels": Categorical(values=(1, 2, 4)), "buckets": Partition()}
    usual: dict[str, Value] = {"bucket_bytes": 65536, "hierarchical": "off"}
    for counts in ((), (1,), (3, 1, 2)):
        check_configuration({**usual, "channels": 2, "buckets": counts}, space)
    for knob, value in [
        ("channels", 3), ("channels", "2"), ("buckets", (0, 3)), ("buckets", (-1,)),
        ("buckets", 3), ("buckets", "3"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=knob):
            check_configuration({**usual, "channels": 1, "buckets": (), knob: value}, space)


def test_a_list_of_buckets_may_come_as_json_has_it() -> None:
    from_json = Configuration({"bucket_bytes": 1, "buckets": [3, 1]})  # type: ignore[dict-item]
    assert from_json == Configuration(bucket_bytes=1, buckets=(3, 1))
    assert hash(from_json) == hash(Configuration(bucket_bytes=1, buckets=(3, 1)))


def test_domains_are_their_own_form_on_the_wire() -> None:
    space = {
        "bucket_bytes": LogInteger(low=65536, high=2**30),
        "channels": Categorical(values=(1, 2, 4)),
        "hierarchical": Categorical(values=("off", "leaders")),
        "buckets": Partition(),
    }
    assert SPACES.validate_json(SPACES.dump_json(space)) == space


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


def test_text_of_others_is_made_harmless() -> None:
    assert clean("\x1b[2Jgone\n\tx\u202e") == "\\x1b[2Jgone\\n\\tx\\u202e"
    assert clean("模型 [b]x") == "模型 [b]x"

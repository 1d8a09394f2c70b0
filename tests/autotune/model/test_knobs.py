from __future__ import annotations

import pytest

from bagua_autotune.model.characters import clean
from bagua_autotune.model.knobs import (
    SPACE as SPACES,
)
from bagua_autotune.model.knobs import Categorical, LogInteger, Partition, check_configuration
from bagua_wire.configuration import Value

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


def test_domains_are_their_own_form_on_the_wire() -> None:
    space = {
        "bucket_bytes": LogInteger(low=65536, high=2**30),
        "channels": Categorical(values=(1, 2, 4)),
        "hierarchical": Categorical(values=("off", "leaders")),
        "buckets": Partition(),
    }
    assert SPACES.validate_json(SPACES.dump_json(space)) == space


def test_text_of_others_is_made_harmless() -> None:
    assert clean("\x1b[2Jgone\n\tx\u202e") == "\\x1b[2Jgone\\n\\tx\\u202e"
    assert clean("模型 [b]x") == "模型 [b]x"

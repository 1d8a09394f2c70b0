"""What a job may be registered with, its knobs, and numbers in the words that people read."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from bagua_autotune.model.job import Limits
from bagua_autotune.model.knobs import Categorical, LogInteger, Partition, check_configuration
from bagua_autotune.model.text import clean, describe_left, describe_seconds, describe_speedup
from bagua_wire.configuration import Value
from tests.autotune.support import make_spec, registration

USUAL = registration()


def with_knob(name: str, domain: dict[str, Any], default: Any) -> dict[str, Any]:
    return {
        "knobs": {**USUAL["knobs"], name: domain},
        "default_configuration": {**USUAL["default_configuration"], name: default},
    }


def test_a_default_may_be_an_explicit_list_that_fits_the_tensors() -> None:
    partition = {"type": "partition"}
    for counts in ([], [250], [100, 150]):
        spec = make_spec(**with_knob("buckets", partition, counts))
        assert spec.default_configuration["buckets"] == tuple(counts)
    with pytest.raises(ValidationError, match="holds 251 tensors, the job has 250"):
        make_spec(**with_knob("buckets", partition, [100, 151]))
    for nonsense in ([0, 250], ["250"], 250, "all", [2.5]):
        with pytest.raises(ValidationError, match="default_configuration"):
            make_spec(**with_knob("buckets", partition, nonsense))


@pytest.mark.parametrize(
    "nonsense",
    [
        {"max_samples": 0},
        {"max_samples": 501},
        {"remaining_steps": 0},
        {"remaining_steps": 10**9 + 1},
        {"max_rounds": 0},
        {"max_rounds": 1001},
        {"max_samples": 2.5},
        {"trial_seconds": 0},
        {"trial_seconds": math.nan},
        {"patience": 3},
    ],
)
def test_limits_out_of_range_are_refused(nonsense: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(nonsense))):
        Limits(**nonsense)


SPACE = {
    "bucket_bytes": LogInteger(low=65536, high=2**30),
    "hierarchical": Categorical(values=("off", "leaders")),
}


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


def test_text_of_others_is_made_harmless() -> None:
    assert clean("\x1b[2Jgone\n\tx\u202e") == "\\x1b[2Jgone\\n\\tx\\u202e"
    assert clean("模型 [b]x") == "模型 [b]x"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (0.0123, "12.3 ms"),
        (0.3, "300 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (1.0, "1 s"),
        (119.4, "119 s"),
        (119.6, "2.0 min"),
        (124, "2.1 min"),
        (1199, "20.0 min"),
        (1201, "20 min"),
        (7169, "119 min"),
        (7199, "2.0 h"),
        (12_600, "3.5 h"),
    ],
)
def test_times_read_well(seconds: float, text: str) -> None:
    assert describe_seconds(seconds) == text


@given(st.floats(1e-4, 1e6))
@example(124.0)
@example(149.0)
@example(7170.0)
def test_a_time_is_near_and_never_has_as_many_of_a_unit_as_the_next_begins_at(
    seconds: float,
) -> None:
    number, unit = describe_seconds(seconds).split()
    factors = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
    assert float(number) * factors[unit] == pytest.approx(seconds, rel=0.0251)
    assert float(number) < {"ms": 1000, "s": 120, "min": 120, "h": 1e9}[unit]


def test_what_is_left() -> None:
    assert [describe_left(s) for s in (0.3, 1.2, 80.4, 7199)] == [
        "under 1 s left", "at most 1 s left", "at most 80 s left", "at most 2.0 h left",
    ]  # fmt: skip


def test_an_interval_without_a_width_is_not_one() -> None:
    assert describe_speedup(1.2, 1.1, 1.3) == "1.20x (1.10 to 1.30)"
    assert describe_speedup(1.2, 1.2, 1.2) == "1.20x"
    assert describe_speedup(1.2, None, 1.3) == "1.20x"

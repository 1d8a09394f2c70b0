"""The levels of a setting, and which take more memory."""

from __future__ import annotations

import math

import pytest

from bagua_runs.places import Argument, EnvironmentVariable, Switch
from bagua_runs.setting import SWITCH_VALUES, Setting

pytestmark = pytest.mark.slow

PLACE = EnvironmentVariable("A")


def test_the_users_own_value_is_the_first_level_and_no_other() -> None:
    levels = Setting(PLACE, ("1000", "2KiB", "x"), own="2e3").levels
    assert levels == {2000: None, 1000: "1000", 2048: "2048", "x": "x"}
    assert list(Setting(PLACE, ("1", "2"), own="2").levels.items()) == [(2, None), (1, "1")]


def test_what_is_not_set_counts_as_the_value_in_force_if_that_is_known() -> None:
    assert Setting(PLACE, ("1", "2"), assumed="2").levels == {2: None, 1: "1"}
    assert Setting(PLACE, ("1", "2")).levels == {"not set": None, 1: "1", 2: "2"}
    assert Setting(PLACE, ("false", "true"), assumed="false").levels == {
        "false": None,
        "true": "true",
    }


def test_nothing_of_0_is_near_1() -> None:
    assert Setting(PLACE, ("0", "1")).levels == {"not set": None, "0": "0", 1: "1"}


def test_too_many_or_too_long_values_are_refused() -> None:
    sixteen = tuple(map(str, range(1, 17)))
    assert len(Setting(PLACE, sixteen, own="1").levels) == 16
    with pytest.raises(ValueError, match=r"A: .*at most 16 values"):
        Setting(PLACE, sixteen)
    with pytest.raises(ValueError, match=r"A: .*at most 16 values, each short"):
        Setting(PLACE, ("x" * 65,))


def test_a_switch_that_has_no_effect_is_not_given() -> None:
    assert Setting(Switch("--a"), SWITCH_VALUES, own="on").idle_level == "off"
    assert Setting(Argument("--a"), ("1", "2"), own="2").idle_level == 2


def test_more_memory_is_a_larger_number_or_a_later_word() -> None:
    numbers = Setting(PLACE, ("0", "8", "4"), own="auto", takes_memory=True)
    assert [numbers.memory_rank(level) for level in ("0", 4, 8)] == [0, 4, 8]
    assert math.isnan(numbers.memory_rank("auto"))
    words = Setting(PLACE, ("NO", "POST", "PRE"), own="OTHER", takes_memory=True)
    assert words.memory_rank("NO") < words.memory_rank("POST") < words.memory_rank("PRE")
    assert math.isnan(words.memory_rank("OTHER"))
    assert math.isnan(words.memory_rank("not set"))

"""What the values of an option may look like, the levels of a setting and which take more memory,
and which combinations are candidates."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_runs.asked import MOST_VALUES, values_of
from bagua_runs.places import (
    LARGEST,
    Argument,
    EnvironmentVariable,
    Place,
    Switch,
    plain,
    whole_number,
)
from bagua_runs.space import MOST_CANDIDATES, SWITCH_VALUES, Condition, SearchSpace, Setting
from bagua_wire.configuration import Configuration, Value

pytestmark = pytest.mark.slow


def test_a_switch_of_the_users_own_goes_with_what_it_needs() -> None:
    """Else the job might refuse to run without the other."""
    space = SearchSpace(
        [
            Setting(Switch("--overlap"), SWITCH_VALUES, own="on"),
            Setting(
                Switch("--gather"), SWITCH_VALUES, "on", condition=Condition("--overlap", ("on",))
            ),
        ]
    )
    changes = [space.changes(candidate) for candidate in space.candidates]
    assert changes == [{}, {"--gather": "off"}, {"--overlap": "off", "--gather": "off"}]


@st.composite
def settings(draw: st.DrawFn) -> list[Setting]:
    found: list[Setting] = []
    for number in range(draw(st.integers(1, 5))):
        name = f"--{'abcdef'[number]}"
        is_switch = draw(st.booleans())
        place: Place = Switch(name) if is_switch else Argument(name)
        values = (
            SWITCH_VALUES if is_switch else draw(st.sampled_from([("1", "2"), ("x", "1", "4")]))
        )
        own = draw(st.sampled_from(values if is_switch else [None, *values, "8"]))
        condition = None
        if found and draw(st.booleans()):
            other = draw(st.sampled_from(found))
            some = st.lists(st.sampled_from(other.values), min_size=1, max_size=2)
            condition = Condition(other.name, tuple(draw(some)))
        found.append(Setting(place, values, own, condition=condition))
    return found


@given(settings())
def test_every_candidate_is_allowed_and_differs_in_something_with_an_effect(
    found: list[Setting],
) -> None:
    space = SearchSpace(found)
    own, *others = space.candidates
    assert {s.name: s.own_level for s in found} == dict(own)
    effective = [_effective(found, candidate) for candidate in space.candidates]
    assert len(set(map(str, effective))) == len(effective)
    for candidate in others:
        active = dict(_effective(found, candidate))
        for setting in found:
            if setting.name not in active:
                assert candidate[setting.name] == setting.idle_level
    reached = {(name, level) for candidate in space.candidates for name, level in candidate.items()}
    free = {(s.name, level) for s in found if s.condition is None for level in s.levels}
    assert free <= reached


def _effective(found: list[Setting], candidate: Configuration) -> list[tuple[str, Value]]:
    """What of a candidate has an effect."""
    active: dict[str, Value] = {}
    for setting in found:
        condition = setting.condition
        if condition is None or (condition.name in active and condition.is_met(candidate)):
            active[setting.name] = candidate[setting.name]
    return sorted(active.items())


@given(settings())
def test_candidates_with_numbers_for_words_are_as_many(found: list[Setting]) -> None:
    space = SearchSpace(found)
    knobs, numbered = space.numbered()
    assert len(set(numbered.values())) == len(space.candidates)
    for candidate in numbered.values():
        assert all(domain.contains(candidate[name]) for name, domain in knobs.items())


def test_of_too_many_combinations_each_value_of_one_setting_stays() -> None:
    values = tuple(map(str, range(2, 17)))
    many = [Setting(Argument(f"--x{number}"), values, own="1") for number in range(6)]
    space = SearchSpace(many)
    assert len(set(space.candidates)) == len(space.candidates) == MOST_CANDIDATES
    assert dict.fromkeys(space.names, 1) == dict(space.own)
    for name in space.names:
        assert {candidate[name] for candidate in space.candidates} == set(range(1, 17))
    assert SearchSpace(many).candidates == space.candidates, "the seed decides"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4096", 4096),
        ("4KiB", 4096),
        ("1.5MiB", 1572864),
        ("2GiB", 2**31),
        ("5e8", 500_000_000),
        ("0", 0),
        ("1e-4", None),
        ("-1", None),
        ("4kb", None),
        ("1e99", None),
        ("٤", None),
        ("", None),
        ("Ring", None),
    ],
)
def test_numbers(text: str, number: int | None) -> None:
    assert whole_number(text) == number


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("Ring, Tree,", ("Ring", "Tree")),
        ("5e8,1MiB,16", ("500000000", "1048576", "16")),
        ("0.5,2.0,1e-3", ("0.5", "2.0", "1e-3")),
        ("1,2,1", ("1", "2")),
        ("1..4", ("1", "2", "3", "4")),
        ("0..100", ("0", "12", "25", "37", "50", "62", "75", "87", "100")),
        ("1MiB..8MiB:log", ("1048576", "2097152", "4194304", "8388608")),
        ("1..9:log", ("1", "2", "4", "9")),
        ("../a,../b", ("../a", "../b")),
    ],
)
def test_lists_and_ranges(text: str, values: tuple[str, ...]) -> None:
    assert values_of(text) == values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no value"),
        (" , ", "has no value"),
        ("8..2", "8 is not below 2"),
        ("0..8:log", "begins above 0"),
        ("1..8:lin", "is no range: write LOW..HIGH"),
        ("1..8,16", "a range stands alone"),
    ],
)
def test_what_is_no_domain_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        values_of(text)


@given(st.integers(0, LARGEST - 1), st.integers(1, LARGEST), st.booleans())
def test_a_range_has_both_ends_and_few_values_in_order(low: int, width: int, log: bool) -> None:
    low, high = (low + 1 if log else low), min(low + 1 + width, LARGEST)
    if low >= high:
        return
    values = [int(value) for value in values_of(f"{low}..{high}" + ":log" * log)]
    assert values[0] == low
    assert values[-1] == high
    assert values == sorted(set(values))
    assert 2 <= len(values) <= MOST_VALUES
    if log and high >= 4 * low:
        ratios = [after / before for before, after in pairwise(values)]
        # Equal steps but for the last, which is neither tiny nor as large as two.
        assert len(set(ratios[:-1])) == 1
        assert 1.4 < ratios[-1] < ratios[0] * 1.5 + 1e-9


@given(st.text(max_size=30))
def test_any_text_is_values_or_an_error_in_words(text: str) -> None:
    try:
        values = values_of(text)
    except ValueError:
        return
    assert values == tuple(dict.fromkeys(values))
    assert all(plain(value) == value for value in values)


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

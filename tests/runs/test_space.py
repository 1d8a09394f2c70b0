"""Which combinations are candidates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_runs.places import Argument, Place, Switch
from bagua_runs.setting import SWITCH_VALUES, Condition, Setting
from bagua_runs.space import MOST_CANDIDATES, SearchSpace
from bagua_wire.configuration import Configuration, Value

pytestmark = pytest.mark.slow

OVERLAP = Setting(Switch("--overlap"), SWITCH_VALUES, own="off")
SIZE = Setting(Argument("--size"), ("1", "2", "4"), condition=Condition("--overlap", ("on",)))
GATHER = Setting(
    Switch("--gather"), SWITCH_VALUES, own="off", condition=Condition("--overlap", ("on",))
)


def test_a_setting_without_effect_stays_as_it_is() -> None:
    space = SearchSpace([OVERLAP, SIZE, GATHER])
    changes = [space.changes(candidate) for candidate in space.candidates]
    assert changes[0] == {}
    assert all(c.get("--overlap") == "on" for c in changes[1:])
    # With the overlap three sizes and none, each with and without gathering.
    assert len(changes) == 1 + 4 * 2


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

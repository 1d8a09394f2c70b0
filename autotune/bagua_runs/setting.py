"""One setting that is varied: its place, its values, and when it has an effect."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from pydantic import ValidationError

from bagua_autotune.model.knobs import Categorical
from bagua_runs.domains import plain, whole_number
from bagua_runs.places import OFF, ON, Place, Switch
from bagua_wire.configuration import Value
from bagua_wire.words import NOT_SET

SWITCH_VALUES = (OFF, ON)


@dataclass(frozen=True)
class Condition:
    """A setting has an effect only where another, of this name, has one of these values, and an
    effect itself."""

    name: str
    values: tuple[str, ...]

    def is_met(self, levels: Mapping[str, Value]) -> bool:
        return levels[self.name] in map(level_of, self.values)


@dataclass(frozen=True)
class Setting:
    """One setting that is varied.

    Attributes:
        place: where its value goes.
        values: to try.
        own: the user's own value; None: the user has none.
        assumed: the value in force where it is not set, if that is known.
        takes_memory: the larger a number, or the later one of other values, the more memory.
        condition: it has an effect only then; None: always.
    """

    place: Place
    values: tuple[str, ...]
    own: str | None = None
    assumed: str | None = None
    takes_memory: bool = False
    condition: Condition | None = None

    def __post_init__(self) -> None:
        try:
            self.domain  # noqa: B018
        except ValidationError as error:
            what = error.errors(include_url=False)[0]["msg"]
            raise ValueError(f"{self.name}: {what} (at most 16 values, each short)") from error

    @property
    def name(self) -> str:
        return self.place.name

    @cached_property
    def levels(self) -> Mapping[Value, str | None]:
        """The name of each value in the search, and the value that the job gets: the user's own
        first, for which the job gets none.

        Numbers above 0 stay numbers, so that a result also informs about neighbouring values; a
        setting that is not set counts as the value in force, if that is known.
        """
        own = next((text for text in (self.own, self.assumed) if text is not None), NOT_SET)
        given = {level_of(value): plain(value) for value in self.values}
        first = level_of(own)
        return {first: None, **{level: text for level, text in given.items() if level != first}}

    @property
    def own_level(self) -> Value:
        return next(iter(self.levels))

    @property
    def idle_level(self) -> Value:
        """Which it has where it has no effect: a switch is not given, all else stays as it is."""
        return OFF if isinstance(self.place, Switch) else self.own_level

    @cached_property
    def domain(self) -> Categorical:
        return Categorical(values=tuple(v for v in self.levels if not isinstance(v, tuple)))

    def memory_rank(self, level: Value) -> float:
        """Return a number that is larger if a level takes more memory; NaN: that is not known."""
        numbers = [whole_number(value) for value in self.values]
        if None not in numbers:
            number = whole_number(str(level))
            return math.nan if number is None else number
        listed = [level_of(value) for value in self.values]
        return listed.index(level) if level in listed else math.nan


def level_of(text: str) -> Value:
    """The name of a value in the search: numbers above 0 are numbers, all else is words."""
    return whole_number(text) or text

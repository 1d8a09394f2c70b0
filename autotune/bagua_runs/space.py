"""Settings that are varied, each with its place, its values, and when it has an effect; and which
combinations of their values may be tried.

NCCL's threads and sockets and our client's channels have the same effect: more connections carry a
bucket at once. So the search uses the number of all connections, and two of the three variables.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from pydantic import ValidationError

from bagua_autotune.model.knobs import Categorical, LogInteger, Space
from bagua_runs.places import OFF, ON, Place, Switch, plain, whole_number
from bagua_wire.configuration import Configuration, Value
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


CHANNELS = "BAGUA_DEFAULT_CHANNELS"
THREADS = "NCCL_SOCKET_NTHREADS"
SOCKETS = "NCCL_NSOCKS_PERTHREAD"
CONNECTED = (THREADS, SOCKETS, CHANNELS)
"""Variables that each multiply the connections between two ranks."""
CONNECTIONS = "connections"
MOST_CONNECTIONS = 64
MOST_THREADS = 16
# At most so many candidates are considered before every run; of more, a sample.
MOST_CANDIDATES = 3000
# So many combinations are all looked at; of more, as many that are drawn.
MOST_COMBINATIONS = 30_000


class SearchSpace:
    """The combinations of some settings' values.

    Args:
        settings: at least one; each after the one that its condition names.
        seed: of the sample, where there are too many candidates.

    Attributes:
        settings: as given.
        candidates: the user's own settings first. Each has the number of its connections, too,
            if several variables decide it. A setting has its ``idle_level`` where it has no effect,
            so no two candidates differ in that only.
        knobs: the part of a candidate that the search uses.
    """

    def __init__(self, settings: Sequence[Setting], seed: int = 0) -> None:
        self.settings = tuple(settings)
        self._connected = [s.name for s in settings if s.name in CONNECTED]
        own_levels = [setting.own_level for setting in settings]
        own = self._candidate(dict(zip(self.names, own_levels, strict=True)))
        combinations = map(self._effective, self._combinations(own_levels, random.Random(seed)))
        others = dict.fromkeys(map(self._candidate, combinations))
        same = {own, self._candidate(self._effective(own_levels))}
        kept = [c for c in others if c not in same and self._is_allowed(c)]
        if len(kept) >= MOST_CANDIDATES:
            kept = random.Random(seed).sample(kept, MOST_CANDIDATES - 1)
        self.candidates = (own, *kept)
        self.knobs: Space = self._knobs()

    @property
    def names(self) -> list[str]:
        return [setting.name for setting in self.settings]

    @property
    def own(self) -> Configuration:
        """The user's own settings."""
        return self.candidates[0]

    def changes(self, configuration: Configuration) -> dict[str, str]:
        """The values that differ from the user's own, by the names of the settings."""
        given = {s.name: s.levels[configuration[s.name]] for s in self.settings}
        return {name: text for name, text in given.items() if text is not None}

    def settings_of(self, configuration: Configuration) -> Configuration:
        """The values of the settings, without the number of connections that they add up to."""
        return Configuration({name: configuration[name] for name in self.names})

    def numbered(self) -> tuple[Space, dict[Configuration, Configuration]]:
        """Knobs and candidates in which words that stand beside two numbers or more are numbers.

        What a job does that is not told a number is not known. So that a few numbers are tried
        first, and not each, such a word stands for one in their middle that is not among them.
        """
        knobs, numbers = dict(self.knobs), dict[str, dict[Value, int]]()
        for setting in self.settings:
            values = setting.domain.values
            known = sorted(value for value in values if isinstance(value, int))
            words = [value for value in values if not isinstance(value, int)]
            if setting.name in knobs and len(known) > 1 and words:
                middle = math.isqrt(known[0] * known[-1])
                free = (n for n in range(max(middle, 1), 2**53) if n not in known)
                given: dict[Value, int] = dict(zip(words, free, strict=False))
                numbers[setting.name] = given
                knobs[setting.name] = Categorical(
                    values=tuple(given[v] if isinstance(v, str) else v for v in values)
                )
        return knobs, {
            candidate: Configuration(
                {knob: numbers.get(knob, {}).get(v, v) for knob, v in candidate.items()}
            )
            for candidate in self.candidates
        }

    def _combinations(
        self, own: Sequence[Value], drawn: random.Random
    ) -> Iterator[tuple[Value, ...]]:
        """All, or if they are too many: those that differ in one value from the user's own, and
        some that are drawn."""
        levels = [tuple(setting.levels) for setting in self.settings]
        if math.prod(map(len, levels)) <= MOST_COMBINATIONS:
            yield from product(*levels)
            return
        for place, values in enumerate(levels):
            yield from ((*own[:place], value, *own[place + 1 :]) for value in values)
        for _ in range(MOST_COMBINATIONS):
            yield tuple(drawn.choice(values) for values in levels)

    def _effective(self, levels: Sequence[Value]) -> dict[str, Value]:
        """The values of a combination, without those that have no effect."""
        values: dict[str, Value] = {}
        idle: set[str] = set()
        for setting, level in zip(self.settings, levels, strict=True):
            condition = setting.condition
            if condition and (condition.name in idle or not condition.is_met(values)):
                idle.add(setting.name)
            values[setting.name] = setting.idle_level if setting.name in idle else level
        return values

    def _candidate(self, values: Mapping[str, Value]) -> Configuration:
        if len(self._connected) > 1:
            return Configuration({**values, CONNECTIONS: _connections(values)})
        return Configuration(values)

    def _is_allowed(self, candidate: Configuration) -> bool:
        threads = candidate.get(THREADS, 1)
        too_many = isinstance(threads, int) and threads > MOST_THREADS
        return not too_many and _connections(candidate) <= MOST_CONNECTIONS

    def _knobs(self) -> Space:
        knobs: Space = {setting.name: setting.domain for setting in self.settings}
        if len(self._connected) < 2:
            return knobs
        counts = [candidate.number(CONNECTIONS) for candidate in self.candidates]
        # The product and all factors but one give the last one.
        implied = SOCKETS if SOCKETS in self._connected else self._connected[0]
        shown = {name: domain for name, domain in knobs.items() if name != implied}
        return {CONNECTIONS: LogInteger(low=min(counts), high=max(counts)), **shown}


def _connections(values: Mapping[str, Value]) -> int:
    numbers = (values.get(name, 1) for name in CONNECTED)
    return math.prod(number for number in numbers if isinstance(number, int))

"""Which combinations of values may be tried.

NCCL's threads and sockets and our client's channels have the same effect: more connections carry a
bucket at once.  So the search uses the number of all connections, and two of the three variables.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from itertools import product

from bagua_autotune.model.knobs import Configuration, LogInteger, Space, Value
from bagua_autotune.system.variables import CONNECTED, SOCKETS, THREADS, Variable

CONNECTIONS = "connections"
MOST_CONNECTIONS = 64
MOST_THREADS = 16
# At most so many candidates are considered before every run; of more, a sample.
MOST_CANDIDATES = 3000


class SearchSpace:
    """The combinations of some variables' values.

    Attributes:
        variables: at least one.
        candidates: the user's own settings first. Each has the number of its connections, too,
            if several variables decide it.
        knobs: the part of a candidate that the search uses.
    """

    def __init__(self, variables: Sequence[Variable], seed: int = 0) -> None:
        self.variables = tuple(variables)
        self._connected = [v.name for v in variables if v.name in CONNECTED]
        own = self._candidate([variable.own_level for variable in variables])
        others = [self._candidate(levels) for levels in product(*(v.levels for v in variables))]
        others = [c for c in others if c != own and self._is_allowed(c)]
        if len(others) >= MOST_CANDIDATES:
            others = random.Random(seed).sample(others, MOST_CANDIDATES - 1)
        self.candidates = (own, *others)
        self.knobs: Space = self._knobs()

    @property
    def own(self) -> Configuration:
        """The user's own settings."""
        return self.candidates[0]

    def environment(self, configuration: Configuration) -> dict[str, str]:
        """The variables that differ from the user's own environment."""
        given = {v.name: v.levels[configuration[v.name]] for v in self.variables}
        return {name: text for name, text in given.items() if text is not None}

    def _candidate(self, levels: Sequence[Value]) -> Configuration:
        values = {v.name: level for v, level in zip(self.variables, levels, strict=True)}
        if len(self._connected) > 1:
            values[CONNECTIONS] = _connections(values)
        return Configuration(values)

    def _is_allowed(self, candidate: Configuration) -> bool:
        threads = candidate.get(THREADS, 1)
        too_many = isinstance(threads, int) and threads > MOST_THREADS
        return not too_many and _connections(candidate) <= MOST_CONNECTIONS

    def _knobs(self) -> Space:
        knobs: Space = {v.name: v.domain for v in self.variables}
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

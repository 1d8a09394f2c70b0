"""The cost of sending one bucket, by the kind of its collective.

The alpha-beta model (Hockney, "The communication challenge for MPP", Parallel Computing 20,
1994): seconds = latency + bytes x seconds per byte.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from bagua_autotune.model.knobs import KNOWN, OTHER, Algorithm, Categorical, Space, choices
from bagua_wire.configuration import Configuration, Value
from bagua_wire.knobs import USUAL_ALGORITHM


class Kind(NamedTuple):
    """The settings that decide the cost of a collective; defaults where a job has no such knob."""

    hierarchical: Value = "off"
    channels: Value = 1
    wire_precision: Value = "as_is"
    algorithm: Value = USUAL_ALGORITHM

    @classmethod
    def of(cls, configuration: Configuration) -> Kind:
        return cls(*(configuration.get(knob, cls._field_defaults[knob]) for knob in cls._fields))

    @property
    def is_chain(self) -> bool:
        """Whether it takes several operations, of which those of two buckets overlap."""
        return self.operations > 1

    @property
    def operations(self) -> int:
        """The operations that send one bucket."""
        return (3 if self.hierarchical != "off" else 1) + bool(self.sends.compresses)

    @property
    def sends(self) -> Algorithm:
        """What its algorithm sends."""
        return KNOWN.get(self.algorithm, OTHER)

    @property
    def channel_count(self) -> int:
        return self.channels if isinstance(self.channels, int) else 1

    @property
    def key(self) -> str:
        """The kind as text, for the store."""
        return json.dumps(self)

    @classmethod
    def parse(cls, key: str) -> Kind:
        """The inverse of ``key``."""
        return cls(*json.loads(key))


@dataclass(frozen=True)
class Cost:
    """The cost of one collective; bytes are those of the gradients.

    Attributes:
        latency_seconds: of an empty collective.
        seconds_per_byte: the time for which it occupies the network.
        chain_seconds_per_byte: the time that the rest of a hierarchical chain takes, while the
            next collective uses the network.
    """

    latency_seconds: float
    seconds_per_byte: float
    chain_seconds_per_byte: float = 0.0

    @property
    def parts(self) -> tuple[float, float, float]:
        """All of it, in this order."""
        return self.latency_seconds, self.seconds_per_byte, self.chain_seconds_per_byte


Costs = Mapping[Kind, Cost]


def kinds_of(space: Space, others: Sequence[Configuration]) -> list[Kind]:
    """Every kind that the knobs of a space allow, and those of some configurations."""
    usual = Kind.of(others[0]) if others else Kind()
    baseline = others[0] if others else Configuration(usual._asdict())
    found: list[Kind] = []
    for stays in choices(space, baseline):
        values = {
            knob: (stays[knob],) if knob in stays else _values(space, knob, usual[place])
            for place, knob in enumerate(Kind._fields)
        }
        found += [Kind(*c) for c in product(*values.values())]
    return list(dict.fromkeys([*found, *map(Kind.of, others)]))


def _values(space: Space, knob: str, usual: Value) -> tuple[Value, ...]:
    domain = space.get(knob)
    return domain.values if isinstance(domain, Categorical) else (usual,)

"""What one bucket's way over the network costs, by the kind of its collective.

The alpha-beta model (Hockney, "The communication challenge for MPP", Parallel Computing 20,
1994): seconds = latency + bytes x seconds per byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from bagua_autotune.model.knobs import Configuration, Value


class Kind(NamedTuple):
    """The settings that decide what a collective costs; those a job has no knob for are usual."""

    hierarchical: Value = "off"
    channels: Value = 1
    wire_precision: Value = "as_is"

    @classmethod
    def of(cls, configuration: Configuration) -> Kind:
        return cls(*(configuration.get(knob, cls._field_defaults[knob]) for knob in cls._fields))

    @property
    def channel_count(self) -> int:
        return self.channels if isinstance(self.channels, int) else 1

    def __str__(self) -> str:
        return "/".join(str(value) for value in self)

    @classmethod
    def parse(cls, text: str) -> Kind:
        """The inverse of ``str``.

        Raises:
            ValueError: it is not the text of a kind.
        """
        hierarchical, channels, precision = text.split("/")
        return cls(hierarchical, int(channels) if channels.isdigit() else channels, precision)


@dataclass(frozen=True)
class Cost:
    """Of one collective. ``seconds_per_byte`` counts the gradients' own bytes."""

    latency_seconds: float
    seconds_per_byte: float


Costs = Mapping[Kind, Cost]

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
    def is_chain(self) -> bool:
        """Whether it is of several operations, of which those of two buckets overlap."""
        return self.hierarchical != "off"

    @property
    def operations(self) -> int:
        """Of which one bucket's way is made."""
        return 3 if self.is_chain else 1

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
    """Of one collective; bytes are the gradients' own.

    Attributes:
        latency_seconds: of an empty one.
        seconds_per_byte: for which the network is taken, before the next one may have it.
        chain_seconds_per_byte: for which the rest of a hierarchical chain takes beside the next.
    """

    latency_seconds: float
    seconds_per_byte: float
    chain_seconds_per_byte: float = 0.0


Costs = Mapping[Kind, Cost]

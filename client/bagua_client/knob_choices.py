"""Reads BAGUA_AUTOTUNE_KNOBS: which knobs keep their defaults, or are limited to some values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bagua_wire.knob_kinds import Value
from bagua_wire.knobs import KNOBS

MOST_VALUES = 8
"""Limit for one knob: the search looks at each value with all values of the other knobs."""


@dataclass(frozen=True)
class Choice:
    """What the user chose for one knob.

    Attributes:
        values: the values to try. A single value is pinned, also in the default configuration.
            Two values of ``bucket_bytes`` are the ends of a range. Empty: the knob keeps its
            default.
    """

    values: tuple[Value, ...] = ()

    @property
    def pinned(self) -> Value | None:
        """The value, if there is exactly one; else None."""
        return self.values[0] if len(self.values) == 1 else None

    def within(self, knob: str, domain: Mapping[str, Any], default: Value) -> dict[str, Any] | None:
        """The part of the knob's domain (API v2) that remains; None: the knob is left out.

        It always contains ``default``, because every trial is compared with the default
        configuration.
        """
        if domain["type"] == "partition":
            return None
        if domain["type"] == "log_integer":
            sizes = [int(size) for size in (default, *self.values)]
            return {**domain, "low": min(sizes), "high": max(sizes)}
        # Any size may be tried; of the other knobs only the values that are possible here.
        offered = self.values if KNOBS[knob].kind.is_open else domain["values"]
        kept = [v for v in offered if v in self.values and v != default]
        return {**domain, "values": [default, *kept]}


def read_choices(text: str) -> dict[str, Choice]:
    """Read a text such as ``-channels,hierarchical=off/leaders,bucket_bytes=1MiB..64MiB``.

    Returns:
        The user's choices, by knob.

    Raises:
        ValueError: the text is not valid; the message names the knob and what it may be set to.
    """
    found: dict[str, Choice] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        knob, equals, said = (word.strip() for word in part.removeprefix("-").partition("="))
        if knob not in KNOBS:
            raise ValueError(
                f"BAGUA_AUTOTUNE_KNOBS names {knob!r}, which is not a knob; the knobs are "
                f"{', '.join(KNOBS)}"
            )
        if knob in found:
            raise ValueError(f"BAGUA_AUTOTUNE_KNOBS names {knob} twice")
        is_off = part.startswith("-")
        values = () if is_off else KNOBS[knob].read(said)
        if is_off == bool(equals) or not (is_off or 0 < len(values) <= MOST_VALUES):
            may_say = KNOBS[knob].may_say
            others = f", or {knob}= and {may_say}" if may_say else ""
            raise ValueError(
                f"BAGUA_AUTOTUNE_KNOBS says {part!r}; it may say -{knob}, which leaves it at its "
                f"default{others}"
            )
        found[knob] = Choice(values)
    return found

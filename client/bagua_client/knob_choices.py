"""Reads BAGUA_AUTOTUNE_KNOBS: which knobs keep their defaults, or are limited to some values."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from bagua_client.configuration import CHANNELS_VALUES, HIERARCHICAL_VALUES

Value = int | str

UNITS = {"": 1, "b": 1, "kib": 1024, "mib": 1024**2, "gib": 1024**3}
SIZE = re.compile(r"(\d+)\s*([a-z]*)", re.IGNORECASE)
MOST_VALUES = 8
"""Limit for one knob: the search looks at each value with all values of the other knobs."""
WORDS: dict[str, Collection[Value]] = {
    "hierarchical": HIERARCHICAL_VALUES,
    "channels": CHANNELS_VALUES,
}
EDGES = ("first_bucket_bytes", "last_bucket_bytes")
MAY_SAY = {
    "bucket_bytes": "a size such as 4MiB, or a range such as 1MiB..64MiB",
    **{knob: f"one or some of {'/'.join(map(str, words))}" for knob, words in WORDS.items()},
    **dict.fromkeys(EDGES, "one or some sizes such as 0/1MiB/4MiB"),
    "buckets": "",
    # BAGUA_AUTOTUNE_ALLOW says which values of these are tried.
    "wire_precision": "",
    "algorithm": "",
}


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
        offered = self.values if knob in EDGES else domain["values"]
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
        if knob not in MAY_SAY:
            raise ValueError(
                f"BAGUA_AUTOTUNE_KNOBS names {knob!r}, which is not a knob; the knobs are "
                f"{', '.join(MAY_SAY)}"
            )
        if knob in found:
            raise ValueError(f"BAGUA_AUTOTUNE_KNOBS names {knob} twice")
        is_off = part.startswith("-")
        values = () if is_off else _values(knob, said)
        if is_off == bool(equals) or not (is_off or 0 < len(values) <= MOST_VALUES):
            others = f", or {knob}= and {MAY_SAY[knob]}" if MAY_SAY[knob] else ""
            raise ValueError(
                f"BAGUA_AUTOTUNE_KNOBS says {part!r}; it may say -{knob}, which leaves it at its "
                f"default{others}"
            )
        found[knob] = Choice(values)
    return found


def _values(knob: str, said: str) -> tuple[Value, ...]:
    """The values in ``said``; empty if one of them cannot be read."""
    if knob in WORDS:
        known = {str(word): word for word in WORDS[knob]}
        values = [known.get(word.strip().lower()) for word in said.split("/")]
    elif knob == "bucket_bytes":
        values = [_size(word) or None for word in said.split("..", 1)]
    else:
        values = [_size(word) for word in said.split("/")] if knob in EDGES else []
    known_values = [value for value in values if value is not None]
    is_understood = len(known_values) == len(values)
    return tuple(dict.fromkeys(known_values)) if is_understood else ()


def _size(word: str) -> int | None:
    found = SIZE.fullmatch(word.strip())
    if found is None or found[2].lower() not in UNITS:
        return None
    return int(found[1]) * UNITS[found[2].lower()]

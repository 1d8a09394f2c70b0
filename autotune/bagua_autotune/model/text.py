"""Configurations and sizes in the words that people read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bagua_autotune.model.knobs import Value

HIERARCHICAL_WORDS = {
    "off": "flat",
    "leaders": "hierarchical",
    "shards": "hierarchical (sharded)",
}
# What these knobs say where they are not in use.
UNUSED: dict[str, Value] = {
    "channels": 1,
    "first_bucket_bytes": 0,
    "last_bucket_bytes": 0,
    "buckets": (),
    "wire_precision": "as_is",
    "algorithm": "gradient_allreduce",
}
# An explicit list of buckets makes these meaningless.
SIZES = ("bucket_bytes", "first_bucket_bytes", "last_bucket_bytes")


def describe_bytes(size_bytes: float) -> str:
    """A size with three significant digits: ``4 MiB``, ``90.5 KiB``, ``512 B``."""
    for unit in ("B", "KiB", "MiB"):
        if round(size_bytes) < 1024:
            return f"{_short(size_bytes)} {unit}"
        size_bytes /= 1024
    return f"{_short(size_bytes)} GiB"


def describe_seconds(seconds: float) -> str:
    """A time for people, at most 2.5 % off: ``12.3 ms``, ``80 s``, ``2.1 min``, ``3.5 h``."""
    # Units change where the rounded number would: 0.9996 s are no 1000 ms.
    if float(_short(seconds * 1e3)) < 1000:
        return f"{_short(seconds * 1e3)} ms"
    if float(_short(seconds)) < 120:
        return f"{_short(seconds)} s"
    minutes = seconds / 60
    if round(minutes) < 120:
        return f"{minutes:.1f} min" if minutes < 20 else f"{minutes:.0f} min"
    return f"{seconds / 3600:.1f} h"


def describe_count(number: int, noun: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def describe_left(seconds: float) -> str:
    """``at most 80 s left``, ``under 1 s left``."""
    whole = round(seconds)
    return f"at most {describe_seconds(whole)} left" if whole else "under 1 s left"


def describe_speedup(speedup: float, low: float | None = None, high: float | None = None) -> str:
    """``1.31x (1.24 to 1.38)``, without the interval where it is not known.

    Nor where it has no width: then nothing is known of the spread, such as of values that are alike
    because they are rounded.
    """
    is_known = low is not None and high is not None and low < high
    return f"{speedup:.2f}x ({low:.2f} to {high:.2f})" if is_known else f"{speedup:.2f}x"


def describe_knob(knob: str, value: Value) -> str:
    """Its value in words; of a knob that no words are known for, name and value."""
    if knob == "bucket_bytes" and isinstance(value, int):
        return f"bucket {describe_bytes(value)}"
    if knob == "hierarchical" and value in HIERARCHICAL_WORDS:
        return HIERARCHICAL_WORDS[str(value)]
    if knob == "buckets" and isinstance(value, tuple):
        return f"custom split, {len(value)} buckets"
    if knob in ("first_bucket_bytes", "last_bucket_bytes") and isinstance(value, int):
        return f"{knob.split('_')[0]} bucket {describe_bytes(value)}"
    if knob == "channels":
        return f"{value} channels"
    if knob == "wire_precision" and value != UNUSED[knob]:
        return f"{value} on the wire (changes the numbers)"
    if knob == "algorithm" and value != UNUSED[knob]:
        return f"algorithm {value} (changes the numbers)"
    return f"{knob} {value}"


def describe(configuration: Mapping[str, Value]) -> str:
    """For example ``bucket 4 MiB, hierarchical``; refinements only where they are in use."""
    hidden: set[tuple[str, Value | None]] = set(UNUSED.items())
    if configuration.get("buckets"):
        hidden |= {(knob, configuration.get(knob)) for knob in SIZES}
    # From JSON a list of buckets comes as a list.
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in configuration.items()}
    return ", ".join(
        describe_knob(knob, value) for knob, value in values.items() if (knob, value) not in hidden
    )


def _short(number: float) -> str:
    # %.3g would write 1000 and above as 1e+03.
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"

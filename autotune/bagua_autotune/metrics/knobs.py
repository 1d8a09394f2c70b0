"""Knobs as labels and numbers."""

from __future__ import annotations

from collections.abc import Mapping

from bagua_autotune.model.knobs import Value
from bagua_autotune.model.text import describe_bytes


def words(knob: str, value: Value) -> str:
    """A value alone, since its knob is a label of its own: ``4 MiB``, ``leaders``."""
    if isinstance(value, tuple):
        return f"{len(value)} buckets" if value else "by size"
    if isinstance(value, int) and knob.endswith("_bytes"):
        return describe_bytes(value)
    return str(value)


def numbers(configuration: Mapping[str, Value] | None) -> dict[tuple[str, ...], float | None]:
    """The values that are numbers, by knob."""
    values = (configuration or {}).items()
    return {(knob,): float(value) for knob, value in values if isinstance(value, int)}

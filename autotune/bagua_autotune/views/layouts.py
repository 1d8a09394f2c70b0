"""How the default and the best configuration cut the tensors into buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bagua_autotune.costs import Layouts
from bagua_autotune.model.buckets import Tensor
from bagua_autotune.model.knobs import Configuration
from bagua_autotune.model.text import describe

Role = Literal["default", "incumbent"]


@dataclass(frozen=True)
class Bucket:
    """So many tensors in gradient-ready order, the first and the last by name."""

    bytes: int
    tensors: int
    first: str
    last: str


@dataclass(frozen=True)
class ShownLayout:
    role: Role
    words: str
    buckets: Sequence[Bucket]


@dataclass(frozen=True)
class JobLayouts:
    """``tensors`` and ``bytes``: how many all layouts hold."""

    tensors: int
    bytes: int
    layouts: Sequence[ShownLayout]


def make_layouts(layouts: Layouts, configurations: dict[Role, Configuration]) -> JobLayouts:
    tensors = layouts.tensors
    return JobLayouts(
        len(tensors),
        sum(tensor.bytes for tensor in tensors),
        [
            ShownLayout(role, describe(configuration), buckets(layouts, configuration))
            for role, configuration in configurations.items()
        ],
    )


def buckets(layouts: Layouts, configuration: Configuration) -> list[Bucket]:
    """In the order in which they can start."""
    tensors = layouts.tensors
    explicit = configuration.get("buckets")
    # An explicit list counts tensors of any group.
    groups = [""] * len(tensors) if explicit else [tensor.group for tensor in tensors]
    waiting: dict[str, list[Tensor]] = {}
    found: list[Bucket] = []
    position = 0
    for last in layouts.cut(configuration).last.tolist():
        while position <= last:
            waiting.setdefault(groups[position], []).append(tensors[position])
            position += 1
        members = waiting.pop(groups[last])
        held_bytes = sum(tensor.bytes for tensor in members)
        found.append(Bucket(held_bytes, len(members), members[0].name, members[-1].name))
    return found

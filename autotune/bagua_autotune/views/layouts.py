"""How the default and the best configuration cut the tensors into buckets."""

from __future__ import annotations

from typing import Literal

from bagua_autotune.costs import Layouts
from bagua_autotune.model.view import View
from bagua_wire.configuration import Configuration
from bagua_wire.words import describe

Role = Literal["default", "incumbent"]


class Bucket(View):
    """A bucket: how many tensors it holds, and the first and last in gradient-ready
    order, by name.
    """

    bytes: int
    tensors: int
    first: str
    last: str


class BucketLayout(View):
    role: Role
    words: str
    buckets: list[Bucket]


class JobBuckets(View):
    """``tensors`` and ``bytes``: how many all layouts hold."""

    tensors: int
    bytes: int
    layouts: list[BucketLayout]


def make_layouts(layouts: Layouts, configurations: dict[Role, Configuration]) -> JobBuckets:
    tensors = layouts.tensors
    return JobBuckets(
        tensors=len(tensors),
        bytes=sum(tensor.bytes for tensor in tensors),
        layouts=[
            BucketLayout(
                role=role, words=describe(configuration), buckets=buckets(layouts, configuration)
            )
            for role, configuration in configurations.items()
        ],
    )


def buckets(layouts: Layouts, configuration: Configuration) -> list[Bucket]:
    """Return the buckets in the order in which they can start."""
    names = [tensor.name for tensor in layouts.tensors]
    return [
        Bucket(
            bytes=cut.bytes,
            tensors=len(cut.positions),
            first=names[cut.positions[0]],
            last=names[cut.last],
        )
        for cut in layouts.buckets(configuration)
    ]

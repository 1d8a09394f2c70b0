"""The rule that cuts a model's tensors into buckets, for all who ask: the ranks that do it, the
cost model, the pages, Bagua's own protocol, and the simulator.

Each group by itself, in gradient-ready order: a bucket is closed as soon as it holds at least
``bucket_bytes``, as by Bagua 0.9 (``AutotuneTaskManager.split_bucket_by_bucket_size``), but never
mixes groups. A group's first bucket may be smaller, and so may its last, the fewest tensors that
amount to ``last_bucket_bytes``. An explicit list of buckets replaces all of that.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

SMALLEST_STRIPE_BYTES = 64 * 1024
"""The smallest stripe of one rank's part of a sharded model's unit: each stripe adds the latency of
a message."""


class Cutting(NamedTuple):
    """All that decides the buckets: two configurations with an equal one have the same.

    Attributes:
        size_bytes: at which a bucket is closed.
        first_bytes: the same for the first of a group; 0: it is like the others.
        last_bytes: what the last of a group amounts to; 0: it is what remains.
        explicit: tensor counts, which replace the sizes.
    """

    size_bytes: int = 0
    first_bytes: int = 0
    last_bytes: int = 0
    explicit: tuple[int, ...] = ()

    @staticmethod
    def of(values: Mapping[str, Any]) -> Cutting:
        """Read the cutting from a configuration's values, by knob; without one for the first or
        last bucket there is none. Without a size nothing travels: each tensor is by itself.
        """
        if explicit := values.get("buckets"):
            return Cutting(explicit=tuple(explicit))
        size = values.get("bucket_bytes", 0)
        first, last = (
            min(values.get(knob, 0), size) for knob in ("first_bucket_bytes", "last_bucket_bytes")
        )
        return Cutting(size, first if first < size else 0, last)


class Bucket(NamedTuple):
    """Tensors that travel together, by their positions in gradient-ready order."""

    bytes: int
    positions: Sequence[int]

    @property
    def last(self) -> int:
        """The tensor that completes it."""
        return self.positions[-1]


class Sized(Protocol):
    """A tensor, as far as the rule looks at it."""

    @property
    def bytes(self) -> int: ...
    @property
    def group(self) -> str: ...


@dataclass(frozen=True)
class Tensor:
    """One gradient, as a job is registered with it.

    Attributes:
        group: dtype and device; only tensors of the same group share a bucket.
    """

    name: str
    elements: int
    bytes: int
    dtype: str
    group: str


class Cutter:
    """Cuts one model's tensors, which stand in gradient-ready order."""

    def __init__(self, tensors: Sequence[Sized]) -> None:
        groups: dict[str, list[int]] = {}
        for position, tensor in enumerate(tensors):
            groups.setdefault(tensor.group, []).append(position)
        sizes = [tensor.bytes for tensor in tensors]
        # Sums of bytes before each of a group's tensors: a bucket's end is found by bisection.
        self._groups = [(members, _sums(sizes, members)) for members in groups.values()]
        everything = range(len(tensors))
        self._everything = everything, _sums(sizes, everything)

    def cut(self, cutting: Cutting) -> list[Bucket]:
        """The buckets in the order in which they can start, which is that of their last tensors.

        Raises:
            ValueError: an explicit list does not hold each tensor once.
        """
        if cutting.explicit:
            everything, sums = self._everything
            if sum(cutting.explicit) != len(everything) or min(cutting.explicit) < 1:
                raise ValueError(
                    f"the explicit buckets hold {sum(cutting.explicit)} tensors, but the model has "
                    f"{len(everything)}"
                )
            return list(_buckets(everything, sums, list(accumulate(cutting.explicit))))
        found = [
            bucket
            for members, sums in self._groups
            for bucket in _buckets(members, sums, _ends(sums, cutting))
        ]
        return sorted(found, key=lambda bucket: bucket.positions[-1])


def _sums(sizes: Sequence[int], members: Sequence[int]) -> list[int]:
    return list(accumulate((sizes[position] for position in members), initial=0))


def _ends(sums: Sequence[int], cutting: Cutting) -> list[int]:
    """How many of a group's tensors lie before the end of each of its buckets."""
    tail = count = len(sums) - 1
    if cutting.last_bytes:
        tail = max(0, bisect_right(sums, sums[-1] - cutting.last_bytes) - 1)
    ends: list[int] = []
    begin = 0
    while begin < tail:
        size = cutting.size_bytes if begin else cutting.first_bytes or cutting.size_bytes
        begin = bisect_left(sums, sums[begin] + size, begin + 1, tail)
        ends.append(begin)
    return ends if tail == count else [*ends, count]


def _buckets(members: Sequence[int], sums: Sequence[int], ends: Sequence[int]) -> Iterator[Bucket]:
    for begin, end in zip([0, *ends], ends, strict=False):
        yield Bucket(sums[end] - sums[begin], members[begin:end])

"""The buckets of many configurations at once, as arrays: what the predictions are made from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bagua_autotune.model.buckets import Tensor
from bagua_autotune.model.knobs import Configuration

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
# Cut positions; two configurations with equal ones have the same buckets.
Key = tuple[int, int, int, tuple[int, ...]]


def cut_key(configuration: Configuration) -> Key:
    """All that decides the buckets. Sizes that explicit buckets replace are left out."""
    explicit = configuration.get("buckets", ())
    if isinstance(explicit, tuple) and explicit:
        return 0, 0, 0, explicit
    size = configuration.number("bucket_bytes")
    first, last = (
        min(configuration.number(knob), size) if knob in configuration else 0
        for knob in ("first_bucket_bytes", "last_bucket_bytes")
    )
    return size, first if first < size else 0, last, ()


class Layout(NamedTuple):
    """One way of cutting the tensors.

    Attributes:
        sizes_bytes: of the buckets, in the order in which they can start.
        last: of each bucket the position of its last tensor in gradient-ready order.
    """

    sizes_bytes: Integers
    last: Integers


def cut(tensors: Sequence[Tensor], key: Key) -> Layout:
    """Cut as the client does: each group by itself, buckets in the order of their last tensors."""
    size, first, last, explicit = key
    sizes = np.array([tensor.bytes for tensor in tensors], np.int64)
    if explicit:
        ends = np.minimum(np.cumsum(explicit), len(tensors))
        return Layout(np.diff(np.cumsum(sizes)[ends - 1], prepend=0), ends - 1)
    groups: dict[str, list[int]] = {}
    for position, tensor in enumerate(tensors):
        groups.setdefault(tensor.group, []).append(position)
    buckets: list[tuple[int, int]] = []
    for members in groups.values():
        positions = np.array(members)
        held = np.concatenate([[0], np.cumsum(sizes[positions])])
        for begin, end in _cut_group(held, size, first, last):
            buckets.append((int(positions[end - 1]), int(held[end] - held[begin])))
    buckets.sort()
    table = np.array(buckets, np.int64).reshape(-1, 2)
    return Layout(table[:, 1], table[:, 0])


def _cut_group(held: Integers, size: int, first: int, last: int) -> list[tuple[int, int]]:
    """Half-open ranges of one group's tensors; ``held[i]`` are the bytes of the first i."""
    count = len(held) - 1
    tail = count
    if last:
        # The fewest at the end that amount to at least ``last``.
        tail = max(0, int(np.searchsorted(held, held[-1] - last, side="right")) - 1)
    ranges = []
    begin = 0
    while begin < tail:
        limit = first if first and begin == 0 else size
        end = min(int(np.searchsorted(held, held[begin] + limit, side="left")), tail)
        end = max(end, begin + 1)
        ranges.append((begin, end))
        begin = end
    return [*ranges, (tail, count)] if tail < count else ranges


@dataclass(frozen=True)
class LayoutTable:
    """The layouts of some configurations, side by side.

    Attributes:
        row_of: for each configuration the row of its layout.
        sizes_bytes: shape (layouts, most buckets), 0 behind a layout's last bucket.
        last: same shape: the position of each bucket's last tensor; 0 behind the last bucket.
        is_bucket: same shape: whether there is a bucket.
    """

    row_of: Integers
    sizes_bytes: Integers
    last: Integers
    is_bucket: NDArray[np.bool_]


class Layouts:
    """Cuts one model's tensors; remembers what it cut, as candidates hardly change."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self._cut = lru_cache(maxsize=4096)(partial(cut, tensors))
        self._digest = lru_cache(maxsize=4096)(self._digest_of)
        self._latest: tuple[Sequence[Configuration], LayoutTable] | None = None

    def table(self, configurations: Sequence[Configuration]) -> LayoutTable:
        """The layouts of some configurations."""
        latest = self._latest
        if latest is not None and latest[0] is configurations:
            return latest[1]
        table = self._make(configurations)
        self._latest = configurations, table
        return table

    def cut(self, configuration: Configuration) -> Layout:
        """The buckets of one configuration."""
        return self._cut(cut_key(configuration))

    def digest(self, configuration: Configuration) -> bytes:
        """Equal for configurations with the same buckets; short, however many these are."""
        return self._digest(cut_key(configuration))

    def average_bytes(self, configurations: Sequence[Configuration]) -> Floats:
        """Of one bucket, for each configuration: how finely its layout is cut."""
        total_bytes = max(sum(tensor.bytes for tensor in self.tensors), 1)
        counts = [len(self.cut(configuration).last) for configuration in configurations]
        return total_bytes / np.array(counts, float)

    def _digest_of(self, key: Key) -> bytes:
        found = hashlib.blake2b(digest_size=16)
        for part in self._cut(key):
            found.update(part.tobytes())
        return found.digest()

    def _make(self, configurations: Sequence[Configuration]) -> LayoutTable:
        rows: dict[Key, int] = {}
        row_of = [rows.setdefault(cut_key(c), len(rows)) for c in configurations]
        layouts = [self._cut(key) for key in rows]
        counts = np.array([len(layout.last) for layout in layouts], np.int64)
        shape = (len(layouts), int(counts.max(initial=1)))
        sizes_bytes, last = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for row, layout in enumerate(layouts):
            sizes_bytes[row, : len(layout.last)] = layout.sizes_bytes
            last[row, : len(layout.last)] = layout.last
        is_bucket = np.arange(shape[1]) < counts[:, None]
        return LayoutTable(np.array(row_of, np.int64), sizes_bytes, last, is_bucket)

"""The buckets of many configurations at once, as arrays, from which costs are predicted."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from bagua_autotune.costs.collectives import Kind
from bagua_wire.configuration import Configuration
from bagua_wire.cutting import Bucket, Cutter, Cutting, Tensor

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class Layout(NamedTuple):
    """A way of cutting the tensors.

    Attributes:
        sizes_bytes: of the buckets, in the order in which they can start; floats, which hold any
            size.
        last: for each bucket the position of its last tensor in gradient-ready order.
    """

    sizes_bytes: Floats
    last: Integers


@dataclass(frozen=True)
class LayoutTable:
    """The layouts and the kinds of some configurations, side by side.

    Attributes:
        cuttings: those that differ; each has a row.
        row_of: for each configuration the row of its layout.
        kinds: those that differ.
        kind_of: for each configuration the place of its kind.
        sizes_bytes: shape (layouts, most buckets), 0 behind a layout's last bucket.
        last: same shape: the position of each bucket's last tensor; 0 behind the last bucket.
        is_bucket: same shape: whether there is a bucket.
    """

    cuttings: Sequence[Cutting]
    row_of: Integers
    kinds: Sequence[Kind]
    kind_of: Integers
    sizes_bytes: Floats
    last: Integers
    is_bucket: NDArray[np.bool_]


NONE: Integers = np.zeros(0, np.int64)
NOTHING = LayoutTable(
    (), NONE, (), NONE, np.zeros((0, 1)), np.zeros((0, 1), np.int64), np.zeros((0, 1), bool)
)


class Layouts:
    """Cuts one model's tensors into buckets; keeps the layouts, as candidates hardly change."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self._cutter = Cutter(tensors)
        self._cut = lru_cache(maxsize=4096)(self._layout)
        self._digest = lru_cache(maxsize=4096)(self._digest_of)
        self._latest: list[tuple[Sequence[Configuration], LayoutTable]] = []

    def table(self, configurations: Sequence[Configuration]) -> LayoutTable:
        """The layouts of some configurations."""
        latest = {id(known): (known, table) for known, table in self._latest}
        found = latest.pop(id(configurations), None)
        found = found or (configurations, self._make(configurations))
        # The candidates that are cut by size, and those with this decision's lists behind them.
        self._latest = [found, *latest.values()][:2]
        return found[1]

    def cut(self, configuration: Configuration) -> Layout:
        """The buckets of one configuration."""
        return self._cut(Cutting.of(configuration))

    def buckets(self, configuration: Configuration) -> list[Bucket]:
        """The buckets of one configuration, with their tensors."""
        return self._cutter.cut(Cutting.of(configuration))

    def digest(self, configuration: Configuration) -> bytes:
        """A short key, equal for configurations with the same buckets."""
        return self._digest(Cutting.of(configuration))

    def average_bytes(self, configurations: Sequence[Configuration]) -> Floats:
        """The average bytes of a bucket, for each configuration."""
        total_bytes = max(sum(tensor.bytes for tensor in self.tensors), 1)
        table = self.table(configurations)
        found: Floats = total_bytes / table.is_bucket.sum(axis=1)[table.row_of]
        return found

    def _layout(self, cutting: Cutting) -> Layout:
        buckets = self._cutter.cut(cutting)
        sizes_bytes = np.array([bucket.bytes for bucket in buckets], float)
        return Layout(sizes_bytes, np.array([bucket.last for bucket in buckets], np.int64))

    def _digest_of(self, cutting: Cutting) -> bytes:
        found = hashlib.blake2b(digest_size=16)
        for part in self._cut(cutting):
            found.update(part.tobytes())
        return found.digest()

    def _make(self, configurations: Sequence[Configuration]) -> LayoutTable:
        # Configurations are hundreds or thousands, and most of them were here before.
        begin = next(
            (table for known, table in self._latest if known == configurations[: len(known)]),
            NOTHING,
        )
        new = configurations[len(begin.row_of) :]
        cuttings, row_of = _numbered(map(Cutting.of, new), begin.cuttings, begin.row_of)
        kinds, kind_of_each = _numbered(map(Kind.of, new), begin.kinds, begin.kind_of)
        layouts = [self._cut(cutting) for cutting in cuttings]
        counts = np.array([len(layout.last) for layout in layouts], np.int64)
        shape = (len(layouts), int(counts.max(initial=1)))
        sizes_bytes, last = np.zeros(shape), np.zeros(shape, np.int64)
        for row, layout in enumerate(layouts):
            sizes_bytes[row, : len(layout.last)] = layout.sizes_bytes
            last[row, : len(layout.last)] = layout.last
        is_bucket = np.arange(shape[1]) < counts[:, None]
        return LayoutTable(cuttings, row_of, kinds, kind_of_each, sizes_bytes, last, is_bucket)


K = TypeVar("K")


def _numbered(
    keys: Iterable[K], known: Sequence[K], numbers: Integers
) -> tuple[Sequence[K], Integers]:
    """The keys that differ, behind the known ones, and the number of each key behind theirs."""
    places = {key: place for place, key in enumerate(known)}
    new = [places.setdefault(key, len(places)) for key in keys]
    return [*places], np.concatenate([numbers, np.array(new, np.int64)])

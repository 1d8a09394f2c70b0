"""The buckets of many configurations at once, as arrays, from which costs are predicted."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bagua_autotune.model.knobs import Configuration
from bagua_autotune.model.layout import Bucket, Cutter, Cutting, Tensor

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
    """The layouts of some configurations, side by side.

    Attributes:
        row_of: for each configuration the row of its layout.
        sizes_bytes: shape (layouts, most buckets), 0 behind a layout's last bucket.
        last: same shape: the position of each bucket's last tensor; 0 behind the last bucket.
        is_bucket: same shape: whether there is a bucket.
    """

    row_of: Integers
    sizes_bytes: Floats
    last: Integers
    is_bucket: NDArray[np.bool_]


class Layouts:
    """Cuts one model's tensors into buckets; keeps the layouts, as candidates hardly change."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self._cutter = Cutter(tensors)
        self._cutting = lru_cache(maxsize=2**15)(Cutting.of)
        self._cut = lru_cache(maxsize=4096)(self._layout)
        self._digest = lru_cache(maxsize=4096)(self._digest_of)
        self._latest: list[tuple[Sequence[Configuration], LayoutTable]] = []

    def table(self, configurations: Sequence[Configuration]) -> LayoutTable:
        """The layouts of some configurations."""
        for known, table in self._latest:
            if known is configurations:
                return table
        table = self._make(configurations)
        # The candidates that are cut by size, and all of this decision.
        self._latest = [(configurations, table), *self._latest[:1]]
        return table

    def cut(self, configuration: Configuration) -> Layout:
        """The buckets of one configuration."""
        return self._cut(self._cutting(configuration))

    def buckets(self, configuration: Configuration) -> list[Bucket]:
        """The buckets of one configuration, with their tensors."""
        return self._cutter.cut(Cutting.of(configuration))

    def digest(self, configuration: Configuration) -> bytes:
        """A short key, equal for configurations with the same buckets."""
        return self._digest(self._cutting(configuration))

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
        rows: dict[Cutting, int] = {}
        row_of = [rows.setdefault(self._cutting(c), len(rows)) for c in configurations]
        layouts = [self._cut(cutting) for cutting in rows]
        counts = np.array([len(layout.last) for layout in layouts], np.int64)
        shape = (len(layouts), int(counts.max(initial=1)))
        sizes_bytes, last = np.zeros(shape), np.zeros(shape, np.int64)
        for row, layout in enumerate(layouts):
            sizes_bytes[row, : len(layout.last)] = layout.sizes_bytes
            last[row, : len(layout.last)] = layout.last
        is_bucket = np.arange(shape[1]) < counts[:, None]
        return LayoutTable(np.array(row_of, np.int64), sizes_bytes, last, is_bucket)

"""The buckets of many configurations at once, as arrays, and from ready times and collective costs
to the length of a step.

Buckets travel in order, each when it is full and the network is free: eq. 7 of Shi, Chu and Li,
"MG-WFBP: Efficient data communication for distributed synchronous SGD algorithms" (INFOCOM
2019).  A large bucket is sent in parts, one on each channel; small buckets use the channels in
turn.  So with k channels a queue takes a k-th of a latency for each part, and at its end the rest
of the last bucket's latency.  All channels together carry the kind's rate.  A hierarchical chain
leaves the slow network before it ends, and the next bucket uses that meanwhile.

So the end is the longest of many paths: one bucket is full and finds the network free, all from it
to another one are sent, and the rest of that one follows. Each is linear in the costs. Of hundreds
of paths only a few can be the longest anywhere within the range of likely costs. They are found
once, and tried with all of these.
"""

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


# The client sends no smaller parts (its reducer/carrier.py).
SMALLEST_PART_BYTES = 512 * 1024


class Queues(NamedTuple):
    """The buckets of some layouts, in the order in which they travel: shape (layouts, buckets).

    Attributes:
        ready_seconds: when each bucket is full.
        bytes: 0 after a layout's last bucket.
        is_bucket: whether there is one.
        channels: process groups that the parts of the buckets use in turn, shape (layouts,).
    """

    ready_seconds: Floats
    bytes: Floats
    is_bucket: NDArray[np.bool_]
    channels: Floats


class Paths(NamedTuple):
    """The paths that may be the longest, those of one layout side by side: shape (paths,).

    Attributes:
        layout: whose path it is; every layout has one.
        start_seconds: when its first bucket is full.
        terms: how often the path takes a latency, and for how many bytes each of the other parts
            of a cost, shape (3, paths); see Cost.
    """

    layout: Integers
    start_seconds: Floats
    terms: Floats

    def seconds(self, costs: Floats) -> Floats:
        """The length of every path.

        Args:
            costs: of each layout's collectives, as a Cost has them: shape (3, layouts).
        """
        latency, rate, tail = costs[:, self.layout] * self.terms
        found: Floats = self.start_seconds + latency + rate + tail
        return found

    def longest(self, seconds: Floats) -> Floats:
        """When the last bucket of each layout has arrived, given the length of every path along
        the last axis."""
        begins = np.flatnonzero(np.diff(self.layout, prepend=-1))
        found: Floats = np.maximum.reduceat(seconds, begins, axis=-1)
        return found

    def take(self, chosen: NDArray[np.bool_] | Integers | slice) -> Paths:
        return Paths(self.layout[chosen], self.start_seconds[chosen], self.terms[:, chosen])


def parts(bytes_: Floats, channels: Floats | int) -> Floats:
    """The number of parts of each bucket."""
    # Ten times as quick as dividing by //.
    found: Floats = np.clip(np.floor(bytes_ / SMALLEST_PART_BYTES), 1.0, channels)
    return found


def latencies(bytes_: Sequence[float], channels: int) -> float:
    """The number of latencies in a queue of buckets of these sizes."""
    # Without arrays: the queues are many, and each has a few buckets.
    shares = [min(max(each // SMALLEST_PART_BYTES, 1), channels) / channels for each in bytes_]
    return sum(shares) + 1 - shares[-1]


def find_paths(queues: Queues, fastest: Floats, slowest: Floats) -> Paths:
    """The paths of which each may be the longest under some costs between two bounds.

    Args:
        fastest: the least of each part of a cost, by layout: shape (3, layouts).
        slowest: the most.
    """
    ready_seconds, bytes_, is_bucket, channels = queues
    shares = parts(bytes_, channels[:, None]) / channels[:, None] * is_bucket
    sent = np.array([np.cumsum(shares, axis=1), np.cumsum(bytes_, axis=1)])
    before = sent - [shares, bytes_]
    # A bucket that finds others under way whatever the costs is never the first of a path.
    latency, rate = fastest[:2, :, None]
    free = ready_seconds - (latency * before[0] + rate * before[1])
    free = np.where(is_bucket, free, -np.inf)
    begins = np.diff(np.maximum.accumulate(free, axis=1), axis=1, prepend=-np.inf) > 0
    # Only the end of a chain can take longer than all that is sent behind it.
    final = is_bucket.sum(axis=1) - 1
    every = np.arange(len(final))
    behind = sent[1, every, final][:, None] - sent[1]
    more = slowest[2][:, None] * (bytes_ - bytes_[every, final][:, None])
    is_end = is_bucket & (more > fastest[1][:, None] * behind)
    is_end[every, final] = True
    layout, end = np.nonzero(is_end)
    queue, begin = np.nonzero(begins[layout] & (np.arange(bytes_.shape[1]) <= end[:, None]))
    layout, end = layout[queue], end[queue]
    carried = sent[:, layout, end] - before[:, layout, begin]
    carried[0] += 1 - shares[layout, end]
    terms = np.concatenate([carried, bytes_[layout, end][None, :]])
    paths = Paths(layout, ready_seconds[layout, begin], terms)
    # Nor is one the longest that is shorter with the highest costs than another with the lowest.
    least = paths.longest(paths.seconds(fastest))
    return paths.take(paths.seconds(slowest) >= least[layout])

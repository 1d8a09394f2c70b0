"""How a configuration cuts a workload's gradients into buckets."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from bagua_autotune.model.buckets import Tensor
from bagua_autotune.model.knobs import Value


@dataclass(frozen=True)
class Bucket:
    """Tensors of one group that travel together; full when its ``last`` tensor is ready.

    Attributes:
        bytes: of its tensors.
        last: the index, in gradient-ready order, of the tensor that completes it.
        dtype: of its tensors.
    """

    bytes: int
    last: int
    dtype: str


class Layouts:
    """All ways of cutting one list of tensors, which stands in gradient-ready order."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        members: dict[str, list[int]] = {}
        for index, tensor in enumerate(tensors):
            members.setdefault(tensor.group, []).append(index)
        # Sums of bytes up to each of a group's tensors: a bucket's end is found by bisection.
        self._groups = [
            (indices, list(accumulate(tensors[index].bytes for index in indices)))
            for indices in members.values()
        ]

    def cut(self, configuration: Mapping[str, Value]) -> list[Bucket]:
        """The buckets in the order in which they become full.

        Knobs that ``configuration`` lacks are as if unused.

        Raises:
            ValueError: ``buckets`` does not fit the tensors.
        """
        explicit = configuration.get("buckets", ())
        if isinstance(explicit, tuple) and explicit:
            return self._explicit(explicit)
        size = _bytes_of(configuration, "bucket_bytes", 25 * 1024**2)
        first = min(_bytes_of(configuration, "first_bucket_bytes", 0), size)
        last = min(_bytes_of(configuration, "last_bucket_bytes", 0), size)
        buckets = [
            bucket
            for indices, sums in self._groups
            for bucket in self._by_size(indices, sums, size, first, last)
        ]
        return sorted(buckets, key=lambda bucket: bucket.last)

    def _by_size(
        self, indices: list[int], sums: list[int], size: int, first: int, last: int
    ) -> list[Bucket]:
        """Cut one group; ``first`` and ``last`` are 0 where they are like the others."""
        ends, start, held = [], 0, 0
        # The last bucket is the fewest tensors that amount to ``last``; the rest is cut before it.
        stop = bisect_right(sums, sums[-1] - last) if last else len(sums)
        while start < stop:
            wanted = held + (first if first and not start else size)
            end = min(bisect_left(sums, wanted, start, stop), stop - 1)
            ends.append(end)
            start, held = end + 1, sums[end]
        if stop < len(sums):
            ends.append(len(sums) - 1)
        dtype = self._tensors[indices[0]].dtype
        before = [0, *(sums[end] for end in ends)]
        return [
            Bucket(sums[end] - held, indices[end], dtype)
            for end, held in zip(ends, before, strict=False)
        ]

    def _explicit(self, counts: Sequence[int]) -> list[Bucket]:
        if sum(counts) != len(self._tensors) or min(counts) < 1:
            raise ValueError(
                f"buckets holds {sum(counts)} tensors in {len(counts)} buckets; "
                f"each of the {len(self._tensors)} tensors must be in one"
            )
        buckets, start = [], 0
        for count in counts:
            tensors = self._tensors[start : start + count]
            if len({tensor.group for tensor in tensors}) > 1:
                raise ValueError(f"buckets: the one from tensor {start} on mixes groups")
            start += count
            size = sum(tensor.bytes for tensor in tensors)
            buckets.append(Bucket(size, start - 1, tensors[0].dtype))
        return buckets


def _bytes_of(configuration: Mapping[str, Value], knob: str, default: int) -> int:
    value = configuration.get(knob, default)
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{knob} is {value!r} and not a number of bytes")
    return value

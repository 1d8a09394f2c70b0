"""What Bagua's algorithms compute, in numpy float32, one step after the other: written down from
its formulas, with no code of the client's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float32]
EPSILON = np.float32(1e-7)


def in_eight_bits(numbers: Numbers, range_elements: int | None = None) -> Numbers:
    """There and back, each range between bounds of its own."""
    if range_elements is not None:
        ranges = np.split(numbers, range(range_elements, len(numbers), range_elements))
        return np.concatenate([in_eight_bits(each) for each in ranges])
    low, high = numbers.min(), numbers.max()
    scale = np.float32(255) / ((high - low) + EPSILON)
    upper = np.rint(high * scale)
    lower = upper - np.float32(255)
    levels = np.clip(np.minimum(np.rint(numbers * scale), upper) - lower, 0, 255).astype(np.uint8)
    found: Numbers = (levels.astype(np.float32) + lower) / scale
    return found


def byte_sum(
    summands: Sequence[Numbers], divisor: int, multiple: int, range_elements: int | None = None
) -> Numbers:
    """Of flat buckets, one of each rank that exchanges: what all of them have afterwards.

    Args:
        divisor: what the sum is divided by.
        multiple: what buckets are filled up to with zeros.
        range_elements: of a chunk; None: all share their bounds, as in Bagua.
    """
    elements = len(summands[0])
    filled = [np.pad(each, (0, -elements % multiple)) for each in summands]
    found = []
    for chunks in zip(*(np.split(each, len(summands)) for each in filled), strict=True):
        total = in_eight_bits(chunks[0], range_elements)
        for chunk in chunks[1:]:
            total = total + in_eight_bits(chunk, range_elements)
        found.append(in_eight_bits(total / np.float32(divisor), range_elements))
    return np.concatenate(found)[:elements]


def node_sums(summands: Sequence[Numbers], nodes: Sequence[Sequence[int]]) -> list[Numbers]:
    """The sum of each node's ranks."""
    sums = []
    for node in nodes:
        total = summands[node[0]]
        for rank in node[1:]:
            total = total + summands[rank]
        sums.append(total)
    return sums

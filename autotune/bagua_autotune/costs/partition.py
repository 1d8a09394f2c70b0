"""The best explicit list of buckets under a cost model, by dynamic programming.

With one channel, and if launching takes no time, a list is best if each of its beginnings is: the
time at which tensors 0..j have arrived depends on earlier buckets only through the time at which
those have arrived.  So
end(j) = min over i < j of max(ready(j), end(i)) + latency + bytes(i..j) x seconds per byte,
the optimal merging that MG-WFBP (Shi, Chu and Li, INFOCOM 2019) finds greedily.  Launches delay
what follows; they are added along the best beginnings, which is nearly optimal.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bagua_autotune.costs.collectives import Cost
from bagua_autotune.costs.layouts import Floats
from bagua_autotune.model.layout import Tensor

# Longer lists are cut only at every few tensors, which loses almost nothing.
MOST_PLACES = 600
# Times that differ by a smaller part are equal but for the rounding, which differs from one
# processor to another.
ROUNDING = 1e-9


def best_partition(
    tensors: Sequence[Tensor], ready_seconds: Floats, cost: Cost, launch_seconds: float = 0.0
) -> tuple[int, ...] | None:
    """Tensor counts of the buckets; None where one contiguous list cannot hold all tensors.

    Args:
        tensors: in gradient-ready order.
        ready_seconds: per tensor, not decreasing.
        cost: of the collectives, one after the other.
        launch_seconds: the delay of all tensors behind a bucket.
    """
    if len({tensor.group for tensor in tensors}) > 1:
        return None
    count = len(tensors)
    stride = -(-count // MOST_PLACES)
    places = np.unique(np.append(np.arange(0, count, stride), count))
    held = np.concatenate([[0], np.cumsum([tensor.bytes for tensor in tensors])])[places]
    sent = held * cost.seconds_per_byte
    arrived = np.zeros(len(places))
    launched = np.full(len(places), launch_seconds)
    best_start = np.zeros(len(places), np.int64)
    for place, ready in enumerate(ready_seconds[places[1:] - 1].tolist(), 1):
        if place == len(places) - 1:
            sent += held * cost.chain_seconds_per_byte
        left = np.maximum(launched[:place] + ready, arrived[:place]) - sent[:place]
        more = cost.latency_seconds + sent[place]
        least = left[left.argmin()]
        # Of equally good starts the latest: fewer bytes wait for the last tensor.
        most = least + (least + more) * ROUNDING
        start = place - 1 - (left[::-1] <= most).argmax()
        best_start[place] = start
        arrived[place] = left[start] + more
        launched[place] = launched[start] + launch_seconds
    counts = []
    place = len(places) - 1
    while place > 0:
        counts.append(int(places[place] - places[best_start[place]]))
        place = int(best_start[place])
    return tuple(reversed(counts))

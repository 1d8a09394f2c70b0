"""From ready times and collective costs to the length of a step.

Buckets travel in order, each when it is full and the network is free: eq. 7 of Shi, Chu and Li,
"MG-WFBP: Efficient data communication for distributed synchronous SGD algorithms" (INFOCOM
2019).  Channels share the link, so that together they carry no more than one; what they hide is
latency: with k of them a queue moves on by a k-th of it for each bucket, and the last bucket
waits for the rest of its own.  A hierarchical chain leaves the slow network before it has ended;
the next bucket takes that meanwhile.
"""

from __future__ import annotations

import numpy as np

from bagua_autotune.costs.collectives import Cost
from bagua_autotune.costs.layouts import Floats


def latencies(buckets: int, channels: int) -> float:
    """How many latencies a queue of so many buckets takes."""
    return buckets / channels + (1 - 1 / channels)


def ends(
    ready_seconds: Floats, bytes_: Floats, is_bucket: Floats, cost: Cost, channels: int = 1
) -> Floats:
    """When the last bucket of each layout has arrived.

    Args:
        ready_seconds: shape (layouts, buckets): when each bucket is full; 0 behind the last.
        bytes_: same shape; 0 behind the last.
        is_bucket: same shape; 1, and 0 behind the last.
        cost: of one collective.
        channels: process groups that the buckets use in turn.

    Returns:
        Seconds, shape (layouts,).
    """
    latency = cost.latency_seconds / channels
    durations = latency * is_bucket + cost.seconds_per_byte * bytes_
    travelled = np.cumsum(durations, axis=1)
    # end_i = max(ready_i, end_{i-1}) + d_i, unrolled: the latest ready_j plus all from j on.
    free = np.maximum.accumulate(ready_seconds - (travelled - durations), axis=1) + travelled
    last: Floats = (free + cost.chain_seconds_per_byte * bytes_).max(axis=1)
    return last + cost.latency_seconds - latency

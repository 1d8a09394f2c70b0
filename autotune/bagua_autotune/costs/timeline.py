"""From ready times and collective costs to the length of a step.

Buckets travel in order, each when it is full and the network is free: eq. 7 of Shi, Chu and Li,
"MG-WFBP: Efficient data communication for distributed synchronous SGD algorithms" (INFOCOM
2019).  A large bucket is sent in parts, one on each channel; small buckets use the channels in
turn.  So with k channels a queue takes a k-th of a latency for each part, and at its end the rest
of the last bucket's latency.  All channels together carry the kind's rate.  A hierarchical chain
leaves the slow network before it ends, and the next bucket uses that meanwhile.
"""

from __future__ import annotations

import numpy as np

from bagua_autotune.costs.collectives import Cost
from bagua_autotune.costs.layouts import Floats

# The client sends no smaller parts (its reducer/comm_hook.py).
SMALLEST_PART_BYTES = 512 * 1024


def parts(bytes_: Floats, channels: int) -> Floats:
    """The number of parts of each bucket."""
    return np.clip(bytes_ // SMALLEST_PART_BYTES, 1.0, float(channels))


def latencies(bytes_: Floats, channels: int) -> float:
    """The number of latencies in a queue of buckets of these sizes."""
    shares = parts(bytes_, channels) / channels
    return float(shares.sum() + 1 - shares[-1])


def ends(
    ready_seconds: Floats, bytes_: Floats, is_bucket: Floats, cost: Cost, channels: int = 1
) -> Floats:
    """When the last bucket of each layout has arrived.

    Args:
        ready_seconds: shape (layouts, buckets): when each bucket is full; 0 after the last.
        bytes_: same shape; 0 after the last.
        is_bucket: same shape; 1 for a bucket, 0 after the last.
        cost: of one collective.
        channels: process groups that the parts of the buckets use in turn.

    Returns:
        Seconds, shape (layouts,).
    """
    latency = cost.latency_seconds * parts(bytes_, channels) / channels * is_bucket
    durations = latency + cost.seconds_per_byte * bytes_
    travelled = np.cumsum(durations, axis=1)
    # end_i = max(ready_i, end_{i-1}) + d_i, unrolled: the latest ready_j plus all from j on.
    free = np.maximum.accumulate(ready_seconds - (travelled - durations), axis=1) + travelled
    rest = cost.latency_seconds * is_bucket - latency + cost.chain_seconds_per_byte * bytes_
    last: Floats = (free + rest).max(axis=1)
    return last

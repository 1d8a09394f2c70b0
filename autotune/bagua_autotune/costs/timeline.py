"""From ready times and collective costs to the length of a step.

Buckets travel in order, each when it is full and its channel is free: eq. 7 of Shi, Chu and Li,
"MG-WFBP: Efficient data communication for distributed synchronous SGD algorithms" (INFOCOM
2019), here with several channels that take the buckets in turn.
"""

from __future__ import annotations

import numpy as np

from bagua_autotune.costs.layouts import Floats


def ends(ready_seconds: Floats, durations: Floats, channels: int = 1) -> Floats:
    """When the last bucket of each layout has arrived.

    Args:
        ready_seconds: shape (layouts, buckets): when each bucket is full; 0 behind the last.
        durations: same shape: how long each one travels; 0 behind the last.
        channels: bucket i travels on channel i mod channels.

    Returns:
        Seconds, shape (layouts,).
    """
    layouts, buckets = durations.shape
    missing = -buckets % channels
    if missing:
        ready_seconds = np.pad(ready_seconds, ((0, 0), (0, missing)))
        durations = np.pad(durations, ((0, 0), (0, missing)))
    ready = ready_seconds.reshape(layouts, -1, channels)
    travelled = np.cumsum(durations.reshape(ready.shape), axis=1)
    before = travelled - durations.reshape(ready.shape)
    # end_i = max(ready_i, end_{i-1}) + d_i, unrolled: the latest ready_j plus all from j on.
    waited = np.maximum.accumulate(ready - before, axis=1)
    found: Floats = (waited[:, -1] + travelled[:, -1]).max(axis=1)
    return found

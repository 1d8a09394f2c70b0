"""Profiles of a network whose costs are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from bagua_autotune.costs import Cost, Kind
from bagua_autotune.model.profile import BucketTiming, Profile

KIB, MIB = 1024, 1024**2
# A cut by 1 MiB of tensors of any size, and what is left over.
SIZES = (MIB, 3 * MIB, MIB, 40 * MIB, 2 * MIB, MIB, 9 * MIB, 200 * KIB)


def profile(
    cost: Cost,
    kind: Kind = Kind(),  # noqa: B008  (immutable)
    sizes: Sequence[int] = SIZES,
    generator: np.random.Generator | None = None,
    noise: float = 0.05,
    slow: Mapping[int, float] | None = None,
) -> Profile:
    """A step in which each bucket takes what it costs, give or take the noise.

    Args:
        slow: by place in the layout, by how much longer a bucket takes.
    """
    generator = generator or np.random.default_rng(0)
    free = [0.0] * kind.channel_count
    buckets = []
    for place, size in enumerate(sizes):
        channel = place % kind.channel_count
        seconds = cost.latency_seconds + cost.seconds_per_byte * size
        seconds *= float(generator.lognormal(0.0, noise)) * (slow or {}).get(place, 1.0)
        ready = 0.1 + 0.01 * place
        free[channel] = max(free[channel], ready) + seconds
        buckets.append(BucketTiming(bytes=size, started_seconds=ready, ended_seconds=free[channel]))
    ready_seconds = tuple(bucket.started_seconds for bucket in buckets)
    return Profile(
        step=10, step_seconds=max(free), ready_seconds=ready_seconds, buckets=tuple(buckets)
    )


def seconds(cost: Cost, size: float) -> float:
    return cost.latency_seconds + cost.seconds_per_byte * size

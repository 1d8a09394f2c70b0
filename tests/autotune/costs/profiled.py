"""Profiles of a network whose costs are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from bagua_autotune.costs import Cost, Kind
from bagua_autotune.costs.layouts import Queues, find_paths
from bagua_wire.profile import BucketTiming, Profile

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
    channels = kind.channel_count
    free, buckets = 0.0, []
    for place, size in enumerate(sizes):
        factor = float(generator.lognormal(0.0, noise)) * (slow or {}).get(place, 1.0)
        ready = 0.1 + 0.01 * place
        # The network is taken for so long; the rest goes on beside the next bucket.
        share = min(max(size // (512 * KIB), 1), channels) / channels
        taken = cost.latency_seconds * share + cost.seconds_per_byte * size
        beside = cost.latency_seconds * (1 - share) + cost.chain_seconds_per_byte * size
        free = max(ready, free) + taken * factor
        buckets.append(
            BucketTiming(bytes=size, started_seconds=ready, ended_seconds=free + beside * factor)
        )
    ready_seconds = tuple(bucket.started_seconds for bucket in buckets)
    return Profile(
        step=10,
        step_seconds=max(bucket.ended_seconds for bucket in buckets),
        ready_seconds=ready_seconds,
        buckets=tuple(buckets),
    )


def seconds(cost: Cost, size: float) -> float:
    """For which one bucket takes the network."""
    return cost.latency_seconds + cost.seconds_per_byte * size


def ends(
    ready_seconds: np.ndarray, bytes_: np.ndarray, is_bucket: np.ndarray, cost: Cost, channels: int
) -> np.ndarray:
    """When the last bucket of each layout has arrived, under one cost."""
    costs = np.repeat(np.array([cost.parts]).T, len(bytes_), axis=1)
    queues = Queues(
        ready_seconds, bytes_, is_bucket.astype(bool), np.full(len(bytes_), float(channels))
    )
    paths = find_paths(queues, costs, costs)
    return paths.longest(paths.seconds(costs))

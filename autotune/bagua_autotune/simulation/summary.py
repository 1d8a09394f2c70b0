"""From the profiled steps of a job to what it computes and what its network does."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bagua_autotune.model.buckets import Tensor
from bagua_autotune.model.knobs import Value
from bagua_autotune.model.profile import BucketTiming, Profile
from bagua_autotune.simulation.recorded import Collective, Record
from bagua_autotune.simulation.simulator import CONTENTION, LAUNCH_SECONDS


def summarise(
    job: str,
    ranks_per_node: Sequence[int],
    tensors: Sequence[Tensor],
    steps: Sequence[tuple[Mapping[str, Value], Profile]],
) -> Record:
    """The record of a job: medians over its profiled steps.

    Args:
        steps: each with the configuration it ran under.

    Raises:
        ValueError: there is no step, or one does not fit the tensors.
    """
    if not steps:
        raise ValueError("no step of this job has been profiled")
    for _, profile in steps:
        if len(profile.ready_seconds) != len(tensors):
            raise ValueError(
                f"step {profile.step} was profiled with {len(profile.ready_seconds)} tensors; "
                f"the job has {len(tensors)}"
            )
    ready = np.median([_idle_ready(*step) for step in steps], axis=0)
    forward = np.median([min(profile.ready_seconds) for _, profile in steps])
    return Record(
        job=job,
        ranks_per_node=tuple(ranks_per_node),
        tensors=tuple(tensors),
        forward_seconds=float(forward),
        ready_seconds=tuple(np.maximum.accumulate(ready).tolist()),
        collectives=tuple(
            collective
            for configuration, profile in steps
            if configuration.get("hierarchical", "off") == "off"
            and configuration.get("channels", 1) == 1
            and configuration.get("wire_precision", "as_is") == "as_is"
            for collective in _collectives(profile.buckets)
        ),
    )


def _idle_ready(configuration: Mapping[str, Value], profile: Profile) -> NDArray[np.float64]:
    """When each tensor would have been ready, since the first one, with an idle network.

    Takes back what the simulator adds: computing that is slower while buckets travel, and the
    launches.
    """
    stages = 1 if configuration.get("hierarchical", "off") == "off" else 3
    channels = configuration.get("channels", 1)
    most = stages * channels if isinstance(channels, int) else stages
    began = min(profile.ready_seconds)
    moments = sorted(
        {began, *profile.ready_seconds}
        | {moment for bucket in profile.buckets for moment in _ends(bucket) if moment > began}
    )
    starts = np.sort([bucket.started_seconds for bucket in profile.buckets])
    ends = np.sort([bucket.ended_seconds for bucket in profile.buckets])
    computed = [0.0]
    for earlier, later in pairwise(moments):
        under_way = np.searchsorted(starts, earlier, "right") - np.searchsorted(
            ends, earlier, "right"
        )
        slowdown = 1 + CONTENTION * math.sqrt(min(max(int(under_way), 0), most))
        computed.append(computed[-1] + (later - earlier) / slowdown)
    ready = np.array(profile.ready_seconds)
    launches = np.searchsorted(starts, ready, "right") * stages * LAUNCH_SECONDS
    idle: NDArray[np.float64] = np.interp(ready, moments, computed) - launches
    return np.clip(idle, 0.0, None)


def _ends(bucket: BucketTiming) -> tuple[float, float]:
    return bucket.started_seconds, bucket.ended_seconds


def _collectives(buckets: Sequence[BucketTiming]) -> list[Collective]:
    """One after the other on one channel: each begins when the one before it is done.

    The first one of a step waits for the rank that computes slowest, so it is left out, unless
    there is no other.
    """
    found, free_at = [], 0.0
    for bucket in sorted(buckets, key=lambda bucket: bucket.started_seconds):
        seconds = bucket.ended_seconds - max(bucket.started_seconds, free_at)
        free_at = max(free_at, bucket.ended_seconds)
        if seconds > 0 and bucket.bytes > 0:
            found.append(Collective(bytes=bucket.bytes, seconds=seconds))
    return found[1:] or found

"""What profiled steps show of the network: typical queues of buckets, under each kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bagua_autotune.costs.collectives import Kind
from bagua_autotune.costs.timeline import latencies
from bagua_wire.profile import BucketTiming, Profile

SMALLEST_SECONDS = 1e-7


class Queue(NamedTuple):
    """Buckets sent without a pause; ``tail_bytes`` are those of the end of the last chain."""

    latencies: float
    bytes: float
    tail_bytes: float
    seconds: float


class Point(NamedTuple):
    """A typical queue under one kind, the median of ``weight`` queues."""

    kind: Kind
    queue: Queue
    weight: int


def points_of(kind: Kind, profiles: Sequence[Profile]) -> list[Point]:
    """The durations of one trial's buckets, reduced to a few sizes."""
    alike: dict[tuple[int, bool], list[Queue]] = {}
    for profile in profiles:
        for queue in _queues(profile, kind):
            place = round(2 * math.log2(queue.bytes)), queue.tail_bytes > 0
            alike.setdefault(place, []).append(queue)
    return [
        Point(kind, Queue(*np.median(np.array(members), axis=0).tolist()), len(members))
        for members in alike.values()
    ]


def _queues(profile: Profile, kind: Kind) -> list[Queue]:
    """The queues of one profiled step.

    On one channel each bucket is a queue by itself, which starts when the previous one has ended.
    Where buckets overlap, on several channels or in a chain, only a whole queue shows the rate of
    the network.
    """
    queues: list[Queue] = []
    waiting: list[BucketTiming] = []
    ended = 0.0
    for bucket in profile.buckets:
        if waiting and bucket.started_seconds >= ended:
            queues += _split(waiting, kind)
            waiting = []
        waiting.append(bucket)
        ended = max(ended, bucket.ended_seconds)
    return queues + _split(waiting, kind)


def _split(buckets: Sequence[BucketTiming], kind: Kind) -> list[Queue]:
    began = buckets[0].started_seconds
    if kind.is_chain or kind.channel_count > 1:
        ended = max(bucket.ended_seconds for bucket in buckets)
        sizes = [float(bucket.bytes) for bucket in buckets]
        tail_bytes = max(sizes) if kind.is_chain else 0.0
        count = latencies(sizes, kind.channel_count)
        return [_queue(count, sum(sizes), tail_bytes, ended - began)]
    queues = []
    for bucket in buckets:
        began = max(began, bucket.started_seconds)
        queues.append(_queue(1.0, bucket.bytes, 0, bucket.ended_seconds - began))
        began = bucket.ended_seconds
    return queues


def _queue(count: float, held: float, tail: float, seconds: float) -> Queue:
    return Queue(count, max(held, 1.0), tail, max(seconds, SMALLEST_SECONDS))

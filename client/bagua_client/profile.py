"""One step in detail: what is recorded of it, and what the service is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BucketTiming:
    """When one bucket was communicated in a step.

    Attributes:
        bytes: size of its tensors, without padding.
        started_seconds: when it was handed to its process group.
        ended_seconds: when its last operation was done.
    """

    bytes: int
    started_seconds: float
    ended_seconds: float


@dataclass(frozen=True)
class GatherTiming:
    """When the parameters of a sharded model's unit were gathered.

    Attributes:
        tensor: the place of the unit's tensor among the registered ones.
        bytes: of all of them, on every rank.
    """

    tensor: int
    bytes: int
    started_seconds: float
    ended_seconds: float


@dataclass(frozen=True)
class Profile:
    """One step of rank 0 in detail. All times count from the end of the previous step's
    communication.

    Attributes:
        trial: the trial that the step belongs to.
        step: the step's number.
        step_seconds: when the step's communication ended.
        ready_seconds: when each tensor became ready, in the registered order.
        buckets: the times of the buckets, in the order of the layout.
        gathers: in the order in which they began; none of a replicated model.
    """

    trial: int
    step: int
    step_seconds: float
    ready_seconds: Sequence[float]
    buckets: Sequence[BucketTiming]
    gathers: Sequence[GatherTiming] = ()

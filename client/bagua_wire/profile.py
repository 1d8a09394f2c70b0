"""A profiled step: when its gradients were ready and its buckets travelled, on rank 0. Apart, as it
is what client, service and simulator share of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BucketTiming:
    """One bucket's way in a step.

    Attributes:
        bytes: size of its tensors, without padding.
        started_seconds: when it was handed to its process group.
        ended_seconds: when its last operation was done, on all ranks.
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
    """One step in detail. All times count from the end of the communication of the step before.

    Attributes:
        step: the step's number.
        step_seconds: when the step's communication ended.
        ready_seconds: when each tensor became ready, in the order in which the job registered them.
        buckets: in the order of the layout.
        gathers: in the order in which they began; none of a replicated model.
    """

    step: int
    step_seconds: float
    ready_seconds: tuple[float, ...]
    buckets: tuple[BucketTiming, ...]
    gathers: tuple[GatherTiming, ...] = ()

"""A profiled step: when its gradients were ready and its buckets travelled, on rank 0."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from bagua_autotune.model.knobs import MOST_BUCKETS

# Bounds that keep every product finite; no step is that long.
Seconds = Annotated[float, Field(ge=0, le=1e9)]


class BucketTiming(BaseModel):
    """One bucket's way: handed over at ``started_seconds``, on all ranks at ``ended_seconds``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    bytes: int = Field(ge=0, le=2**53)
    started_seconds: Seconds
    ended_seconds: Seconds


class GatherTiming(BaseModel):
    """When the parameters of a sharded model's unit were gathered; ``tensor`` is its place among
    the registered ones, ``bytes`` those of all of them on every rank."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    tensor: int = Field(ge=0, lt=MOST_BUCKETS)
    bytes: int = Field(ge=0, le=2**53)
    started_seconds: Seconds
    ended_seconds: Seconds


class Profile(BaseModel):
    """All times are relative to the end of the communication of the step before.

    Attributes:
        step: the training step.
        step_seconds: the end of this step's communication.
        ready_seconds: one per tensor, in the order in which the job registered them.
        buckets: in the order of the layout.
        gathers: in the order in which they began; none of a replicated model.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    step: int = Field(ge=0, le=2**53)
    step_seconds: Seconds
    ready_seconds: tuple[Seconds, ...] = Field(
        min_length=1, max_length=MOST_BUCKETS, fail_fast=True, strict=False
    )
    buckets: tuple[BucketTiming, ...] = Field(
        min_length=1, max_length=MOST_BUCKETS, fail_fast=True, strict=False
    )
    gathers: tuple[GatherTiming, ...] = Field(
        default=(), max_length=MOST_BUCKETS, fail_fast=True, strict=False
    )


class TrialProfile(Profile):
    """A step run under a trial, as rank 0 saw it. Safe to send twice."""

    trial: Annotated[int, Field(ge=0, lt=2**31)]

    @property
    def profile(self) -> Profile:
        return Profile.model_construct(**{name: value for name, value in self if name != "trial"})

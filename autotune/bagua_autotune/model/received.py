"""Tensors, profiled steps and memory as somebody may send them: the bounds of their fields."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetPydanticSchema,
    TypeAdapter,
)
from pydantic_core import CoreSchema, core_schema

from bagua_autotune.model.knobs import MOST_BUCKETS, Number
from bagua_autotune.model.text import without_nul
from bagua_wire.cutting import Tensor
from bagua_wire.profile import BucketTiming, GatherTiming, Profile

Label = Annotated[str, Field(min_length=1, max_length=512), AfterValidator(without_nul)]
# Bounds that keep every product finite; no step is that long.
Seconds = Annotated[float, Field(ge=0, le=1e9)]


def _checked(**kinds: Any) -> GetPydanticSchema:
    """Lets pydantic make a record of the wire from an object that has its fields and no other.

    Args:
        kinds: what each field may be.
    """

    def schema(record: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        checked = [
            core_schema.dataclass_field(name, handler.generate_schema(kind), kw_only=True)
            for name, kind in kinds.items()
        ]
        return core_schema.dataclass_schema(
            record,
            core_schema.dataclass_args_schema(record.__name__, checked),
            list(kinds),
            config={"strict": True, "extra_fields_behavior": "forbid", "allow_inf_nan": False},
            strict=False,  # Else it had to be a record already.
        )

    return GetPydanticSchema(schema)


_SPAN = {"bytes": Number, "started_seconds": Seconds, "ended_seconds": Seconds}
ReceivedTensor = Annotated[
    Tensor, _checked(name=Label, elements=Number, bytes=Number, dtype=Label, group=Label)
]
ReceivedBucket = Annotated[BucketTiming, _checked(**_SPAN)]
ReceivedGather = Annotated[
    GatherTiming, _checked(tensor=Annotated[int, Field(ge=0, lt=MOST_BUCKETS)], **_SPAN)
]


PROFILE = TypeAdapter(Profile)
"""Of one that is known to be within these bounds, such as a stored one."""


class TrialProfile(BaseModel):
    """A step run under a trial, as rank 0 saw it. Safe to send twice.

    Its attributes are those of :class:`bagua_wire.profile.Profile`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    step: int = Field(ge=0, le=2**53)
    step_seconds: Seconds
    ready_seconds: tuple[Seconds, ...] = Field(
        min_length=1, max_length=MOST_BUCKETS, fail_fast=True, strict=False
    )
    buckets: tuple[ReceivedBucket, ...] = Field(
        min_length=1, max_length=MOST_BUCKETS, fail_fast=True, strict=False
    )
    gathers: tuple[ReceivedGather, ...] = Field(
        default=(), max_length=MOST_BUCKETS, fail_fast=True, strict=False
    )
    trial: Annotated[int, Field(ge=0, lt=2**31)]

    @property
    def profile(self) -> Profile:
        return Profile(**{name: value for name, value in self if name != "trial"})


Bytes = Annotated[int, Field(ge=0, le=2**53)]


class Memory(BaseModel):
    """What a configuration takes on the ranks' devices: of the one that is the fullest, at its
    peak.

    Attributes:
        peak_bytes: what the configuration takes, or would take.
        limit_bytes: what it may take.
        device_bytes: what there is for the rank.
        is_predicted: it was not tried.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    peak_bytes: Bytes
    limit_bytes: Bytes
    device_bytes: Annotated[Bytes, Field(ge=1)]
    is_predicted: bool = False

    @property
    def share(self) -> float:
        """Of what there is for the rank."""
        return self.peak_bytes / self.device_bytes

    @property
    def is_unproven(self) -> bool:
        """Whether it would fit by what is predicted, but is too far from all that was measured."""
        return self.is_predicted and self.peak_bytes <= self.limit_bytes


def fullest(found: Iterable[Memory | None]) -> Memory | None:
    """The one of the highest share; None without any."""
    return max(filter(None, found), key=lambda memory: memory.share, default=None)

"""The memory that a configuration takes on the ranks' devices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Bytes = Annotated[int, Field(ge=0, le=2**53)]


class Memory(BaseModel):
    """Of the rank whose device is the fullest, as its peak.

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

"""A model's tensors, as a job is registered with them."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from bagua_autotune.model.characters import without_nul

Label = Annotated[str, Field(min_length=1, max_length=512), AfterValidator(without_nul)]


class Tensor(BaseModel):
    """One gradient: only tensors of the same ``group`` (dtype and device) share a bucket."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Label
    elements: int = Field(ge=0, le=2**53)
    bytes: int = Field(ge=0, le=2**53)
    dtype: Label
    group: Label

"""Cutting a list of tensors into buckets, by the rule of Bagua 0.9.

The rule (``bagua.service.AutotuneTaskManager.split_bucket_by_bucket_size``): groups in a
given order, inside each the tensors in theirs; a bucket is closed as soon as it holds at
least ``bucket_bytes``.  Unlike Bagua, a bucket never mixes groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from bagua_autotune.model.text import without_nul

Label = Annotated[str, Field(min_length=1, max_length=512), AfterValidator(without_nul)]


class Tensor(BaseModel):
    """One gradient: only tensors of the same ``group`` (dtype and device) share a bucket."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Label
    elements: int = Field(ge=0, le=2**53)
    bytes: int = Field(ge=0, le=2**53)
    dtype: Label
    group: Label


def cut(
    tensors: Iterable[Tensor], bucket_bytes: int, groups: Sequence[str] | None = None
) -> list[list[Tensor]]:
    """Buckets of the tensors; each tensor is in exactly one.

    Args:
        tensors: in gradient-ready order.
        bucket_bytes: a bucket is closed once it holds at least so many bytes.
        groups: the order of the groups; by default that of their first tensors.

    Raises:
        ValueError: a tensor's group is not among ``groups``.
    """
    members: dict[str, list[Tensor]] = {group: [] for group in groups or ()}
    for tensor in tensors:
        if groups is not None and tensor.group not in members:
            raise ValueError(f"tensor {tensor.name!r} is of group {tensor.group!r}, not listed")
        members.setdefault(tensor.group, []).append(tensor)
    buckets: list[list[Tensor]] = []
    for group in members.values():
        bucket: list[Tensor] = []
        held_bytes = 0
        for tensor in group:
            bucket.append(tensor)
            held_bytes += tensor.bytes
            if held_bytes >= bucket_bytes:
                buckets.append(bucket)
                bucket, held_bytes = [], 0
        if bucket:
            buckets.append(bucket)
    return buckets

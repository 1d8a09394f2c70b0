"""A bucket: tensors of one dtype and device in one flat piece of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from bagua_client.communication.operations import Operation


class Bucket:
    """Tensors whose values travel as one message, and the operations that carry them.

    Attributes:
        indices: positions of its tensors in the model's tensor list.
        flat: one dimension, contiguous; holds all the tensors, and zeros up to a multiple of
            ``multiple_of`` elements.
        views: one per tensor, in the shape and, where memory allows, the strides of it.
        channel: which of the configuration's channels it travels on.
        operations: the chain of communication operations, run in this order.
        missing: tensors that are not ready yet in this step.
    """

    def __init__(
        self,
        indices: Sequence[int],
        tensors: Sequence[torch.Tensor],
        multiple_of: int = 1,
        channel: int = 0,
    ) -> None:
        self.indices = tuple(indices)
        elements = sum(tensor.numel() for tensor in tensors)
        padded = -(-elements // multiple_of) * multiple_of
        self.flat = torch.zeros(padded, dtype=tensors[0].dtype, device=tensors[0].device)
        self.views = tuple(_views(self.flat, tensors))
        self.channel = channel
        self.operations: tuple[Operation, ...] = ()
        self.missing = len(self.indices)


def _views(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    views = []
    offset = 0
    for tensor in tensors:
        # A gradient with its parameter's strides is what autograd accumulates into in place.
        strides = tensor.stride() if _is_dense(tensor) else _contiguous_strides(tensor.shape)
        views.append(flat.as_strided(tensor.shape, strides, offset))
        offset += tensor.numel()
    return views


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements fill one piece of memory, each place once."""
    expected = 1
    dimensions = [(s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1]
    for stride, size in sorted(dimensions):
        if stride != expected:
            return False
        expected *= size
    return True


def _contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    strides = []
    stride = 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))

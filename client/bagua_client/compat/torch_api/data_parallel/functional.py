"""Communication that gradients flow through."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def all_reduce(
    tensor: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """``tensor`` reduced over all ranks of ``group`` (None: all of the job); the argument stays as
    it is. Its gradient is that of all ranks' results, reduced in the same way. All ranks must call
    it, and run the backward pass.

    Args:
        op: of ``torch.distributed.ReduceOp``.
    """
    found: torch.Tensor = _AllReduce.apply(op, group, tensor)  # type: ignore[no-untyped-call]
    return found


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Any, group: dist.ProcessGroup | None, tensor: torch.Tensor) -> Any:
        ctx.op, ctx.group = op, group
        reduced = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(reduced, op=op, group=group)
        return reduced

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, all_reduce(gradients[0], ctx.op, ctx.group)

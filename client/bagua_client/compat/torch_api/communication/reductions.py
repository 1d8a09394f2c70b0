"""Reductions and gatherings of flat tensors over a process group, where its backend lacks some.

Everything here is synchronous, takes tensors of one dimension and answers with new ones.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import reduce as fold

import torch
import torch.distributed as dist

from bagua_client.communication.operations import all_gather, reduce_scatter


class ReduceOp(IntEnum):
    """How the values of several ranks become one; the numbers are Bagua's.

    BOR, BAND and BXOR are for integers. AVG is the sum divided by the number of ranks, for integers
    rounded towards zero. Sums and products of uint8 wrap around.
    """

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BOR = 7
    BAND = 8
    BXOR = 9
    AVG = 10


_TORCHS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.AVG: dist.ReduceOp.SUM,  # divided afterwards: gloo averages no integers
}
# NCCL has none of these: every rank gets all values and computes the result itself.
_BITWISE: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def reduced(
    flat: torch.Tensor, op: int, group: dist.ProcessGroup, dst: int | None = None
) -> torch.Tensor:
    """``flat`` of all ranks in one.

    Args:
        op: one of :class:`ReduceOp`.
        dst: the rank of ``group`` on which the result is needed; others get anything. None: all.

    Raises:
        ValueError: there is no such operation, or not for this dtype.
    """
    op = ReduceOp(op)
    if op in _BITWISE:
        _check_integers(flat, op)
        return fold(_BITWISE[op], gathered(flat, group).chunk(dist.get_world_size(group)))
    result = flat.clone()
    if dst is None:
        wait(dist.all_reduce(result, _TORCHS[op], group, async_op=True))
    else:
        root = dist.get_global_rank(group, dst)
        wait(dist.reduce(result, root, _TORCHS[op], group, async_op=True))
    return _averaged(result, group) if op == ReduceOp.AVG else result


def reduced_part(flat: torch.Tensor, op: int, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's part of :func:`reduced`; ``flat`` divides evenly by the number of ranks."""
    op = ReduceOp(op)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if op in _BITWISE:
        return reduced(flat, op, group).chunk(ranks)[rank]
    result = flat.new_empty(flat.numel() // ranks)
    wait(reduce_scatter(result, flat, _TORCHS[op], group, async_op=True))
    return _averaged(result, group) if op == ReduceOp.AVG else result


def gathered(flat: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``flat`` of all ranks, one after the other."""
    result = flat.new_empty(flat.numel() * dist.get_world_size(group))
    wait(all_gather(result, flat, group=group, async_op=True))
    return result


def wait(work: dist.Work | None) -> None:
    """Until it is done; on CUDA until it stands in the current stream."""
    if work is not None:
        work.wait()


def _averaged(total: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    ranks = dist.get_world_size(group)
    if total.dtype.is_floating_point or total.dtype.is_complex:
        return total.div_(ranks)
    return total.div_(ranks, rounding_mode="trunc")


def _check_integers(flat: torch.Tensor, op: ReduceOp) -> None:
    if flat.dtype.is_floating_point or flat.dtype.is_complex:
        raise ValueError(f"{op.name} is for integers, not for {flat.dtype}")

"""Bagua's reductions over a process group of torch, whose waiting can be ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from enum import IntEnum
from functools import reduce as fold

import torch
import torch.distributed as dist

from bagua_client.communication.operations import all_gather, reduce_scatter

LOOK = timedelta(milliseconds=200)
"""How often a rank that waits looks whether it was aborted."""


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


class Aborted(RuntimeError):
    """Raised where what was waited for was given up."""


class Collectives:
    """Reductions and gatherings of tensors of one dimension, where torch's backends lack some.

    Each answers with a new tensor when it is there.

    Attributes:
        aborted: may be set from another thread; whatever waits then raises :class:`Aborted`.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self.aborted = threading.Event()

    def reduced(self, flat: torch.Tensor, op: int, dst: int | None = None) -> torch.Tensor:
        """``flat`` of all ranks in one.

        Args:
            op: one of :class:`ReduceOp`.
            dst: the rank on which the result is needed; others get anything. None: all.

        Raises:
            ValueError: there is no such operation, or not for this dtype.
        """
        op = ReduceOp(op)
        if op in _BITWISE:
            _check_integers(flat, op)
            return fold(_BITWISE[op], self.gathered(flat).chunk(self.ranks))
        result = flat.clone()
        if dst is None:
            self.wait(dist.all_reduce(result, _TORCHS[op], self.group, async_op=True), flat)
        else:
            root = dist.get_global_rank(self.group, dst)
            self.wait(dist.reduce(result, root, _TORCHS[op], self.group, async_op=True), flat)
        return self._averaged(result) if op == ReduceOp.AVG else result

    def reduced_part(self, flat: torch.Tensor, op: int) -> torch.Tensor:
        """Return this rank's part of :meth:`reduced`; ``flat`` divides evenly by the number of
        ranks.
        """
        op = ReduceOp(op)
        if op in _BITWISE:
            return self.reduced(flat, op).chunk(self.ranks)[self.rank]
        result = flat.new_empty(flat.numel() // self.ranks)
        self.wait(reduce_scatter(result, flat, _TORCHS[op], self.group, async_op=True), flat)
        return self._averaged(result) if op == ReduceOp.AVG else result

    def gathered(self, flat: torch.Tensor) -> torch.Tensor:
        """``flat`` of all ranks, one after the other."""
        result = flat.new_empty(flat.numel() * self.ranks)
        self.wait(all_gather(result, flat, group=self.group, async_op=True), flat)
        return result

    def wait(self, work: dist.Work | None, sent: torch.Tensor) -> None:
        """Wait until the work is done; with NCCL until it stands in the current stream.

        Only for collectives: gloo takes it for a failure if one waits for a message in steps.

        Args:
            sent: one of its tensors; a group may have gloo for the CPU and NCCL for GPUs.
        """
        if work is None:
            return
        if sent.is_cuda and "nccl" in dist.get_backend_config(self.group):
            work.wait()
            return
        while not self.aborted.is_set():
            try:
                work.wait(LOOK)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # Raises what it ended with; it may have just ended well.
                    return
        raise Aborted

    def _averaged(self, total: torch.Tensor) -> torch.Tensor:
        if total.dtype.is_floating_point or total.dtype.is_complex:
            return total.div_(self.ranks)
        return total.div_(self.ranks, rounding_mode="trunc")


def _check_integers(flat: torch.Tensor, op: ReduceOp) -> None:
    if flat.dtype.is_floating_point or flat.dtype.is_complex:
        raise ValueError(f"{op.name} is for integers, not for {flat.dtype}")

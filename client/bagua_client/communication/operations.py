"""The communication operations that a bucket's chain consists of.

Starting an operation on the bucket's flat tensor returns the work to wait for, or None if the
operation is already done. An operation changes the tensor in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist


class Operation(Protocol):
    """One operation of a bucket's chain.

    The smallest example, which flips the sign of the tensor::

        class Negate:
            def start(self, flat):
                flat.neg_()
                return None
    """

    def start(self, flat: torch.Tensor) -> dist.Work | None:
        """Start on ``flat`` (one-dimensional, contiguous) without waiting."""


class Start:
    """An operation made of the function ``start``."""

    def __init__(self, start: Callable[[torch.Tensor], dist.Work | None]) -> None:
        self.start = start


class _InGroup:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group


class AllReduce(_InGroup):
    """Sum over all ranks of ``group``."""

    def start(self, flat: torch.Tensor) -> dist.Work | None:
        work: dist.Work | None = dist.all_reduce(flat, group=self.group, async_op=True)
        return work


class Reduce:
    """Sum over the ranks of ``group``; only ``destination`` (a global rank) gets the sum."""

    def __init__(self, group: dist.ProcessGroup, destination: int) -> None:
        self.group = group
        self.destination = destination

    def start(self, flat: torch.Tensor) -> dist.Work | None:
        work: dist.Work | None = dist.reduce(
            flat, dst=self.destination, group=self.group, async_op=True
        )
        return work


class Broadcast:
    """Copies the tensor of ``source`` (a global rank) to all ranks of ``group``."""

    def __init__(self, group: dist.ProcessGroup, source: int) -> None:
        self.group = group
        self.source = source

    def start(self, flat: torch.Tensor) -> dist.Work | None:
        work: dist.Work | None = dist.broadcast(
            flat, src=self.source, group=self.group, async_op=True
        )
        return work


class ReduceScatter(_InGroup):
    """Sum over the ranks of ``group``; each rank gets the sum of its own shard only.

    The size of the group must divide the element count of ``flat``.
    """

    def start(self, flat: torch.Tensor) -> dist.Work | None:
        work: dist.Work | None = reduce_scatter(
            shard(flat, self.group), flat, group=self.group, async_op=True
        )
        return work


class OnShard:
    """Runs ``operation`` on the shard of this rank in the group ``inside``."""

    def __init__(self, inside: dist.ProcessGroup, operation: Operation) -> None:
        self.inside = inside
        self.operation = operation

    def start(self, flat: torch.Tensor) -> dist.Work | None:
        return self.operation.start(shard(flat, self.inside))


class AllGatherShards(_InGroup):
    """Copies each rank's shard to all ranks of ``group``."""

    def start(self, flat: torch.Tensor) -> dist.Work | None:
        work: dist.Work | None = all_gather(
            flat, shard(flat, self.group), group=self.group, async_op=True
        )
        return work


def shard(flat: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The equal part of ``flat`` that belongs to this rank of ``group``."""
    elements = flat.numel() // dist.get_world_size(group)
    return flat.narrow(0, dist.get_rank(group) * elements, elements)


# torch 2.13 renamed both functions and warns about the old names, the only ones that 2.6 has.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def swap(
    flat: torch.Tensor, peers: Sequence[int], group: dist.ProcessGroup
) -> tuple[dict[int, torch.Tensor], dist.Work | None]:
    """Send ``flat`` to each of ``peers`` (ranks of ``group``); receive a tensor of its size from
    each.

    Returns:
        The tensor received from each peer, by rank, and the work after which they may be read.
    """
    peers = sorted(set(peers))
    sizes = [flat.numel() * (rank in peers) for rank in range(dist.get_world_size(group))]
    sent = flat if len(peers) == 1 else flat.repeat(len(peers))
    received = torch.empty_like(sent)
    work: dist.Work | None = dist.all_to_all_single(
        received, sent, sizes, sizes, group=group, async_op=True
    )
    parts = received.view(len(peers), -1).unbind()
    return dict(zip(peers, parts, strict=True)), work


class PeerAverage:
    """Replaces the tensor by its mean with that of one peer, which does the same with this rank.

    Args:
        peer: the peer's rank in ``group``.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self._group = group
        self._peer = peer
        self._theirs: dict[int, torch.Tensor] = {}

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The operations, in order."""
        return Start(self._swap), Start(self._average)

    def _swap(self, flat: torch.Tensor) -> dist.Work | None:
        self._theirs, work = swap(flat, [self._peer], self._group)
        return work

    def _average(self, flat: torch.Tensor) -> None:
        flat.add_(self._theirs.pop(self._peer)).mul_(0.5)

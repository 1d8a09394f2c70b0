"""The communication operations a bucket's chain is made of.

An operation gets the bucket's flat tensor and starts; it answers with the work to wait for, or
with None when it is done already. It changes the tensor in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist


class Operation(Protocol):
    """One link of a bucket's chain.

    The smallest one, which flips the sign of what travels::

        class Negate:
            def start(self, flat):
                flat.neg_()
                return None
    """

    def start(self, flat: torch.Tensor) -> dist.Work | None:
        """Start on ``flat`` (one dimension, contiguous), without waiting."""


class Start:
    """A function as an operation."""

    def __init__(self, start: Callable[[torch.Tensor], dist.Work | None]) -> None:
        self.start = start


class AllReduce:
    """Sum over all ranks of ``group``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def start(self, flat: torch.Tensor) -> dist.Work | None:
        work: dist.Work | None = dist.all_reduce(flat, group=self.group, async_op=True)
        return work


class Reduce:
    """Sum over the ranks of ``group``, right on ``destination`` (a global rank) only."""

    def __init__(self, group: dist.ProcessGroup, destination: int) -> None:
        self.group = group
        self.destination = destination

    def start(self, flat: torch.Tensor) -> dist.Work | None:
        work: dist.Work | None = dist.reduce(
            flat, dst=self.destination, group=self.group, async_op=True
        )
        return work


class Broadcast:
    """The value of ``source`` (a global rank) on all ranks of ``group``."""

    def __init__(self, group: dist.ProcessGroup, source: int) -> None:
        self.group = group
        self.source = source

    def start(self, flat: torch.Tensor) -> dist.Work | None:
        work: dist.Work | None = dist.broadcast(
            flat, src=self.source, group=self.group, async_op=True
        )
        return work


class ReduceScatter:
    """Sum over the ranks of ``group``; each is right on its own shard only.

    ``flat`` must divide evenly by the size of the group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def start(self, flat: torch.Tensor) -> dist.Work | None:
        work: dist.Work | None = reduce_scatter(
            shard(flat, self.group), flat, group=self.group, async_op=True
        )
        return work


class OnShard:
    """``operation`` on this rank's shard of ``inside``."""

    def __init__(self, inside: dist.ProcessGroup, operation: Operation) -> None:
        self.inside = inside
        self.operation = operation

    def start(self, flat: torch.Tensor) -> dist.Work | None:
        return self.operation.start(shard(flat, self.inside))


class AllGatherShards:
    """The shards of all ranks of ``group``, on all of them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def start(self, flat: torch.Tensor) -> dist.Work | None:
        work: dist.Work | None = all_gather(
            flat, shard(flat, self.group), group=self.group, async_op=True
        )
        return work


def shard(flat: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The part of ``flat`` that this rank of ``group`` answers for."""
    elements = flat.numel() // dist.get_world_size(group)
    return flat.narrow(0, dist.get_rank(group) * elements, elements)


# torch 2.13 renamed both and warns about the names that 2.6 has.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

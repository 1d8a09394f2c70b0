"""Communication operations that send eight bits for each number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from bagua_client.communication.operations import Operation, Start, all_gather, shard
from bagua_client.communication.peers import swap
from bagua_client.compression import compress, decompress


class CompressedSum:
    """Each rank sums up the chunk of the others' that is its own.

    Args:
        groups: over the same ranks, for the first and for the second of its exchanges.
        divisor: what the sum is divided by, in float32, before it is sent.
        range_elements: how many numbers share a minimum and a maximum; None: those of a chunk.
        beside: error feedback: what travels as a whole, of which the operations may be given a part
            only, and what was lost of it so far, float32 beside it.
    """

    def __init__(
        self,
        groups: Sequence[dist.ProcessGroup],
        divisor: float,
        range_elements: int | None = None,
        beside: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self._first, self._last = groups[0], groups[-1]
        self._ranks = dist.get_world_size(self._first)
        self._divisor = divisor
        self._range_elements = range_elements
        self._beside = beside
        self._packed = self._received = torch.empty(0, dtype=torch.uint8)

    @property
    def operations(self) -> tuple[Operation, ...]:
        """In their order. They hold this sum and it none of them: its buffers go with the last."""
        return Start(self._scatter), Start(self._gather), Start(self._unpack)

    def _scatter(self, flat: torch.Tensor) -> dist.Work | None:
        """Each chunk to its rank."""
        chunks = flat.view(self._ranks, -1)
        lost = None if self._beside is None else _part(flat, *self._beside)
        if lost is not None:
            flat.add_(lost)
        self._packed = compress(chunks, range_elements=self._range_elements)
        if lost is not None:
            kept = self._unpacked(self._packed, torch.empty_like(chunks))
            torch.sub(chunks, kept, out=lost.view_as(chunks))
            _only_finite(lost)
        self._received = torch.empty_like(self._packed)
        work: dist.Work | None = dist.all_to_all_single(
            self._received, self._packed, group=self._first, async_op=True
        )
        return work

    def _gather(self, flat: torch.Tensor) -> dist.Work | None:
        """The own chunk's sum to all."""
        own = shard(flat, self._first)
        decompress(self._received, own, self._divisor, self._range_elements)
        packed = compress(own[None], range_elements=self._range_elements)
        if self._beside is not None:
            lost = shard(_part(flat, *self._beside), self._first)
            missing = own - self._unpacked(packed, torch.empty_like(own))
            lost.add_(_only_finite(missing.float()), alpha=self._divisor)
        self._packed = packed
        shape = self._ranks, packed.shape[1]
        self._received = torch.empty(shape, dtype=torch.uint8, device=flat.device)
        work: dist.Work | None = all_gather(
            self._received.view(-1), packed.view(-1), group=self._last, async_op=True
        )
        return work

    def _unpack(self, flat: torch.Tensor) -> None:
        """The own chunk too: all ranks have the same bits."""
        self._unpacked(self._received, flat.view(self._ranks, -1))

    def _unpacked(self, packed: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return decompress(packed, out, range_elements=self._range_elements)


class RingUpdate:
    """A rank sends its two neighbours by how much its weights have changed.

    Args:
        whole: what travels, of which the operations may be given a part only.
        replicas: of the weights, beside ``whole``: what is known of this rank's, of the left one's
            and of the right one's.
    """

    def __init__(
        self, group: dist.ProcessGroup, whole: torch.Tensor, replicas: Sequence[torch.Tensor]
    ) -> None:
        self._group = group
        self._whole = whole
        self._replicas = replicas
        self._change = torch.empty(0, dtype=torch.uint8)
        self._changes: dict[int, torch.Tensor] = {}

    @property
    def operations(self) -> tuple[Operation, ...]:
        """In their order."""
        return Start(self._tell), Start(self._apply)

    @property
    def _neighbours(self) -> tuple[int, int]:
        rank, ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        return (rank - 1) % ranks, (rank + 1) % ranks

    def _tell(self, flat: torch.Tensor) -> dist.Work | None:
        own, left, right = (_part(flat, self._whole, each) for each in self._replicas)
        change = flat.float().add(left, alpha=1 / 3).add_(right, alpha=1 / 3)
        self._change = compress(change.add_(own, alpha=-5 / 3)[None])[0]
        self._changes, work = swap(self._change, self._neighbours, self._group)
        return work

    def _apply(self, flat: torch.Tensor) -> None:
        own, left, right = (_part(flat, self._whole, each) for each in self._replicas)
        of_left, of_right = (self._changes[rank] for rank in self._neighbours)
        for replica, change in ((left, of_left), (right, of_right), (own, self._change)):
            replica.add_(decompress(change[None], torch.empty_like(replica)))
        flat.copy_(own)


def _part(flat: torch.Tensor, whole: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
    """What is beside ``flat``, which is a part of ``whole``."""
    return beside.narrow(0, flat.storage_offset() - whole.storage_offset(), flat.numel())


def _only_finite(lost: torch.Tensor) -> torch.Tensor:
    """What is lost of infinite gradients, whose step is skipped, would never go again."""
    return lost.nan_to_num_(0.0, 0.0, 0.0)

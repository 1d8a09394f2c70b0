"""Communication operations that send eight bits for each number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from bagua_client.communication.operations import Operation, Start, all_gather, shard
from bagua_client.communication.peers import swap
from bagua_client.compression import compress, decompress


class CompressedSum:
    """A compressed all-reduce: each rank sums one chunk of all ranks' tensors and sends the sum.

    Args:
        groups: process groups over the same ranks: the first is for the first exchange (the
            chunks), the last for the second (the sums).
        divisor: each sum is divided by it, in float32, before it is sent.
        range_elements: how many numbers share a minimum and a maximum; None: all of a chunk.
        beside: for error feedback: the whole tensor that travels (the operations may get only a
            part of it), and a float32 tensor of the same length with what compression has lost of
            each number so far; None: no error feedback.
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
        """The operations, in order. They hold this object, which holds none of them: its buffers
        are freed with the last operation."""
        return Start(self._scatter), Start(self._gather), Start(self._unpack)

    def _scatter(self, flat: torch.Tensor) -> dist.Work | None:
        """Send each chunk to the rank that sums it."""
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
        """Send the sum of this rank's chunk to all ranks."""
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
        """Unpack all chunks, including this rank's own, so that all ranks have the same bits."""
        self._unpacked(self._received, flat.view(self._ranks, -1))

    def _unpacked(self, packed: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return decompress(packed, out, range_elements=self._range_elements)


class RingUpdate:
    """Sends each rank's compressed change of its weights to its two neighbours in the ring.

    Args:
        whole: the whole tensor that travels; the operations may get only a part of it.
        replicas: three tensors of the length of ``whole``: the weights of this rank, of its left
            and of its right neighbour, as far as they are known from the changes sent.
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
        """The operations, in order."""
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
    """The part of ``beside`` at the place that ``flat`` has in ``whole``."""
    return beside.narrow(0, flat.storage_offset() - whole.storage_offset(), flat.numel())


def _only_finite(lost: torch.Tensor) -> torch.Tensor:
    """Replace numbers that are not finite by 0, in place: the step of infinite gradients is
    skipped, but their error would stay in the error feedback for ever."""
    return lost.nan_to_num_(0.0, 0.0, 0.0)

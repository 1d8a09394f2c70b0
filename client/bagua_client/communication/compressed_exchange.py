"""Communication operations that send eight bits for each number, or two thin factors of
each matrix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bagua_client.communication.operations import (
    AllReduce,
    Operation,
    Start,
    all_gather,
    shard,
    swap,
)
from bagua_client.compression import compress, decompress
from bagua_client.torch_private.power_sgd import orthogonalize


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


NAN = float("nan")


@dataclass(frozen=True)
class LowRankBucket:
    """A bucket's flat tensor, taken apart.

    Attributes:
        matrices: views of shape (n, m), in lists of one shape whose matrices are multiplied
            together.
        rest: flat views of what travels as it is.
        rank: of the approximation; a matrix that has fewer rows or columns has as many as those.
        starts: flat, for each matrix in turn the (m, rank) numbers that approximating it begins
            with; afterwards those that came of it.
        lost: in the layout of the flat tensor, what compressing has left out, and which the flat
            tensor holds already; afterwards what it leaves out now. None: that is not kept.
    """

    matrices: Sequence[Sequence[torch.Tensor]]
    rest: Sequence[torch.Tensor]
    rank: int
    starts: torch.Tensor
    lost: torch.Tensor | None


class LowRankSum:
    """An average over all ranks, in which each matrix is approximated by one of low rank.

    One step of the subspace iteration of PowerSGD (Vogels et al., NeurIPS 2019, arXiv 1905.13727,
    algorithm 1): P = M Q is summed over the ranks and made orthonormal, Q = transposed M times P is
    averaged, and the average of M is P times transposed Q. The numbers and their order are those of
    torch's hook. Beyond that P travels beside what is not compressed, and numbers that are not
    finite, or columns of zeros, do not spoil the steps that follow.

    Args:
        groups: process groups over the same ranks: the first is for what is not compressed and for
            P, the last for Q.
        ranks: how many ranks' gradients are averaged. Where nodes sum up inside first, these are
            more than a group has.
    """

    def __init__(
        self, groups: Sequence[dist.ProcessGroup], ranks: int, bucket: LowRankBucket
    ) -> None:
        self._first, self._last = AllReduce(groups[0]), AllReduce(groups[-1])
        self._ranks = ranks
        self._ranks_each = ranks / dist.get_world_size(groups[0])
        self._bucket = bucket
        self._work: dist.Work | None = None
        self._stacks: list[torch.Tensor] = []
        self._ps: list[torch.Tensor] = []
        self._qs: list[torch.Tensor] = []
        self._p = self._rest = torch.empty(0)

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The operations, in order. They hold this object, which holds none of them: its buffers
        are freed with the last operation."""
        return Start(self._project), Start(self._complete), Start(self._restore)

    def _project(self, flat: torch.Tensor) -> dist.Work | None:
        """Send what is not compressed, and P."""
        bucket = self._bucket
        if bucket.lost is not None:
            bucket.lost.copy_(flat)
        if bucket.rest:
            self._rest = torch.cat(list(bucket.rest))
            self._work = self._first.start(self._rest)
        if not bucket.matrices:
            return None
        self._stacks = [_stacked(same) for same in bucket.matrices]
        ranks = [min(*stack.shape[1:], bucket.rank) for stack in self._stacks]
        shapes = [(*stack.shape[:2], r) for stack, r in zip(self._stacks, ranks, strict=True)]
        self._p = flat.new_empty(sum(count * n * r for count, n, r in shapes))
        self._ps = list(_blocks(self._p, shapes))
        shapes = [(len(s), s.shape[2], r) for s, r in zip(self._stacks, ranks, strict=True)]
        self._qs = list(_blocks(bucket.starts, shapes))
        for q in self._qs:
            orthogonalize(q)
        _begin_anew_where_nan(bucket.starts)
        for stack, q, p in zip(self._stacks, self._qs, self._ps, strict=True):
            torch.bmm(stack, q, out=p)
        return self._first.start(self._p)

    def _complete(self, flat: torch.Tensor) -> dist.Work | None:
        """Send Q, and put in place what is not compressed."""
        work = None
        if self._stacks:
            is_finite = self._p.isfinite().all()
            for p in self._ps:
                orthogonalize(p)
            # A matrix of zeros has columns of zeros; any other NaN must reach all ranks.
            self._p.nan_to_num_(0.0, 0.0, 0.0).masked_fill_(~is_finite, NAN)
            for stack, p, q in zip(self._stacks, self._ps, self._qs, strict=True):
                torch.bmm(stack.transpose(1, 2), p, out=q)
            work = self._last.start(self._bucket.starts)
        if self._work is not None:
            self._work.wait()
            rest = self._bucket.rest
            means = torch.split(self._rest.div_(self._ranks), [part.numel() for part in rest])
            for part, mean in zip(rest, means, strict=True):
                part.copy_(mean)
        return work

    def _restore(self, flat: torch.Tensor) -> None:
        """Put in place the products, and keep what they lack."""
        self._bucket.starts.div_(self._ranks)
        for p, q, stack in zip(self._ps, self._qs, self._stacks, strict=True):
            torch.bmm(p, q.transpose(1, 2), out=stack)
        for stack, same in zip(self._stacks, self._bucket.matrices, strict=True):
            for matrix, mean in zip(same, stack, strict=True) if len(same) > 1 else ():
                matrix.copy_(mean)
        lost = self._bucket.lost
        if lost is not None:
            # A rank's own, as all have got the mean: together it is what the mean lacks. The step
            # of infinite gradients is skipped, but their error would stay for ever.
            lost.sub_(flat, alpha=self._ranks_each).nan_to_num_(0.0, 0.0, 0.0)


def _stacked(same: Sequence[torch.Tensor]) -> torch.Tensor:
    """Matrices as one tensor of shape (matrices, n, m); a single one is not copied."""
    return same[0].unsqueeze(0) if len(same) == 1 else torch.stack(list(same))


def _blocks(memory: torch.Tensor, shapes: Sequence[tuple[int, int, int]]) -> Iterator[torch.Tensor]:
    """Parts of a flat tensor, one after the other, in these shapes."""
    start = 0
    for count, rows, columns in shapes:
        elements = count * rows * columns
        yield memory[start : start + elements].view(count, rows, columns)
        start += elements


def _begin_anew_where_nan(starts: torch.Tensor) -> None:
    """Replace NaN, in place, by numbers that are the same on all ranks and that no column of has
    the direction of another.

    Orthogonalizing gives NaN where a matrix was 0 in the step before, and after numbers that were
    not finite. Nothing but NaN, or 0, would ever come of it again.
    """
    others = torch.arange(starts.numel(), dtype=torch.float32, device=starts.device)
    others = others.square_().mul_(0.37).sin_().to(starts.dtype)
    starts.copy_(torch.where(starts.isnan(), others, starts))

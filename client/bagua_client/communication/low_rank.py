"""Communication operations that send two thin factors of each matrix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bagua_client.communication.operations import AllReduce, Operation, Start
from bagua_client.torch_private.power_sgd import orthogonalize

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

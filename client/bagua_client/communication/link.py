"""What goes between a few ranks, each of which holds one part of a whole: in stripes, one on each
of several process groups, which travel at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

SMALLEST_STRIPE_BYTES = 64 * 1024
"""The smallest stripe of one rank's part: each stripe adds the latency of a message."""
ALIGNED_ELEMENTS = 64
"""Each stripe begins at a multiple of this many elements: NCCL copies 16 bytes at a time."""

_all_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Link:
    """All of its methods are collective, and have what they return ordered before what follows on
    the current stream.

    Args:
        groups: process groups over the same ranks in the same order, one for each stripe.

    Attributes:
        ranks: how many there are.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._groups = groups
        self.ranks = dist.get_world_size(groups[0])

    def all_gather(self, part: torch.Tensor, by_rank: torch.Tensor) -> None:
        """Gather the ranks' parts.

        Args:
            part: (elements,), contiguous: this rank's.
            by_rank: (ranks, elements), contiguous: a row for each rank.
        """
        stripes = self._stripes(part)
        if len(stripes) == 1:
            _wait(_all_gather(by_rank.view(-1), part, group=self._groups[0], async_op=True))
            return
        under_way = []
        for group, (begin, end) in zip(self._groups, stripes, strict=False):
            stripe = part.new_empty(self.ranks * (end - begin))
            work = _all_gather(stripe, part[begin:end], group=group, async_op=True)
            under_way.append((work, stripe, begin, end))
        for work, stripe, begin, end in under_way:
            _wait(work)
            by_rank[:, begin:end].copy_(stripe.view(self.ranks, -1))

    def reduce_scatter(self, by_rank: torch.Tensor, part: torch.Tensor, op: Any) -> None:
        """Reduce the ranks' tensors; each rank keeps its row.

        Args:
            by_rank: (ranks, elements), contiguous.
            part: (elements,), contiguous: this rank's row, reduced.
            op: torch's.
        """
        stripes = self._stripes(part)
        if len(stripes) == 1:
            whole = by_rank.view(-1)
            _wait(_reduce_scatter(part, whole, op=op, group=self._groups[0], async_op=True))
            return
        under_way = []
        for group, (begin, end) in zip(self._groups, stripes, strict=False):
            stripe = by_rank[:, begin:end].contiguous().view(-1)
            own = part.new_empty(end - begin)
            work = _reduce_scatter(own, stripe, op=op, group=group, async_op=True)
            under_way.append((work, stripe, own, begin, end))
        for work, _, own, begin, end in under_way:
            _wait(work)
            part[begin:end].copy_(own)

    def all_to_all(self, by_rank: torch.Tensor) -> torch.Tensor:
        """Send each rank its row.

        Args:
            by_rank: (ranks, elements), contiguous.

        Returns:
            (ranks, elements): what each rank has sent to this one.
        """
        stripes = self._stripes(by_rank[0])
        received = torch.empty_like(by_rank)
        if len(stripes) == 1:
            group = self._groups[0]
            _wait(dist.all_to_all_single(received, by_rank, group=group, async_op=True))
            return received
        under_way = []
        for group, (begin, end) in zip(self._groups, stripes, strict=False):
            sent = by_rank[:, begin:end].contiguous()
            got = torch.empty_like(sent)
            work = dist.all_to_all_single(got, sent, group=group, async_op=True)
            under_way.append((work, sent, got, begin, end))
        for work, _, got, begin, end in under_way:
            _wait(work)
            received[:, begin:end].copy_(got)
        return received

    def _stripes(self, part: torch.Tensor) -> list[tuple[int, int]]:
        """Where the stripes of one rank's part begin and end."""
        elements = part.numel()
        most = min(len(self._groups), max(part.nbytes // SMALLEST_STRIPE_BYTES, 1))
        cuts = [elements * at // most // ALIGNED_ELEMENTS * ALIGNED_ELEMENTS for at in range(most)]
        ends = [*cuts[1:], elements]
        return [(begin, end) for begin, end in zip(cuts, ends, strict=True) if end > begin]


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()

"""What goes between a few ranks, each of which holds one part of a whole, or a copy of it: in
stripes, one on each of several process groups, which travel at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bagua_client.communication.operations import all_gather, reduce_scatter
from bagua_wire.cutting import SMALLEST_STRIPE_BYTES

ALIGNED_ELEMENTS = 64
"""Each stripe begins at a multiple of this many elements: NCCL copies 16 bytes at a time."""


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
        self._exchange(part, by_rank, all_gather)

    def reduce_scatter(self, by_rank: torch.Tensor, part: torch.Tensor, op: Any) -> None:
        """Reduce the ranks' tensors; each rank keeps its row.

        Args:
            by_rank: (ranks, elements), contiguous.
            part: (elements,), contiguous: this rank's row, reduced.
            op: torch's.
        """
        self._exchange(by_rank, part, partial(reduce_scatter, op=op))

    def all_reduce(self, whole: torch.Tensor, op: Any) -> None:
        """Reduce the ranks' tensors, in place.

        Args:
            whole: (elements,), contiguous.
            op: torch's.
        """
        under_way = [
            dist.all_reduce(whole[begin:end], op=op, group=group, async_op=True)
            for group, (begin, end) in zip(self._groups, self._stripes(whole), strict=False)
        ]
        for work in under_way:
            _wait(work)

    def all_to_all(self, by_rank: torch.Tensor) -> torch.Tensor:
        """Send each rank its row.

        Args:
            by_rank: (ranks, elements), contiguous.

        Returns:
            (ranks, elements): what each rank has sent to this one.
        """
        received = torch.empty_like(by_rank)
        self._exchange(by_rank, received, dist.all_to_all_single)
        return received

    def _exchange(
        self, sent: torch.Tensor, received: torch.Tensor, start: Callable[..., dist.Work | None]
    ) -> None:
        """Run a collective of torch's; each stripe is a part of all rows."""
        stripes = self._stripes(sent)
        if len(stripes) == 1:
            group = self._groups[0]
            _wait(start(received.view(-1), sent.view(-1), group=group, async_op=True))
            return
        under_way = []
        for group, (begin, end) in zip(self._groups, stripes, strict=False):
            own = sent[..., begin:end].contiguous()
            got = received.new_empty(*received.shape[:-1], end - begin)
            work = start(got.view(-1), own.view(-1), group=group, async_op=True)
            under_way.append((work, own, got, begin, end))  # Both are in use until it has ended.
        for work, _, got, begin, end in under_way:
            _wait(work)
            received[..., begin:end].copy_(got)

    def _stripes(self, sent: torch.Tensor) -> list[tuple[int, int]]:
        """Where the stripes of one rank's part, a row, begin and end."""
        elements = sent.shape[-1]
        row_bytes = elements * sent.element_size()
        most = min(len(self._groups), max(row_bytes // SMALLEST_STRIPE_BYTES, 1))
        cuts = [elements * at // most // ALIGNED_ELEMENTS * ALIGNED_ELEMENTS for at in range(most)]
        ends = [*cuts[1:], elements]
        return [(begin, end) for begin, end in zip(cuts, ends, strict=True) if end > begin]


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()

"""Exchanges between a few ranks of a group: an all-to-all in which most parts are empty."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from bagua_client.communication.operations import Operation, Start


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

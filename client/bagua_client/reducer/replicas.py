"""Makes the replicas equal: parameters and buffers at the start, buffers before each forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from bagua_client.communication.communicator import Communicator


class Replicas:
    """Tensors that all ranks take over from rank 0, few messages for many tensors.

    Args:
        tensors: answers with them anew each time; a module may put another tensor in the place
            of a buffer.
    """

    def __init__(
        self, tensors: Callable[[], Iterable[torch.Tensor]], communicator: Communicator
    ) -> None:
        self._tensors = tensors
        self._communicator = communicator

    @torch.no_grad()
    def take_over(self) -> None:
        """Broadcast rank 0's values. All ranks must call it together."""
        communicator = self._communicator
        source = dist.get_global_rank(communicator.group, 0)
        groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for tensor in self._tensors():
            groups.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
        for tensors in groups.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            dist.broadcast(flat, src=source, group=communicator.group)
            if communicator.rank == 0:
                continue
            parts = torch.split(flat, [tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

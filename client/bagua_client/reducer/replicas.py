"""Makes the replicas equal: parameters and buffers at the start, buffers before each forward."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from bagua_client.communication.communicator import Communicator


class Replicas:
    """A list of tensors that all ranks take over from rank 0, few messages for many tensors."""

    def __init__(self, tensors: Iterable[torch.Tensor], communicator: Communicator) -> None:
        self._communicator = communicator
        self._groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for tensor in tensors:
            self._groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)

    @torch.no_grad()
    def take_over(self) -> None:
        """Broadcast rank 0's values. All ranks must call it together."""
        communicator = self._communicator
        source = dist.get_global_rank(communicator.group, 0)
        for tensors in self._groups.values():
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
            dist.broadcast(flat, src=source, group=communicator.group)
            if communicator.rank == 0:
                continue
            parts = torch.split(flat, [tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.detach().copy_(part.view(tensor.shape))

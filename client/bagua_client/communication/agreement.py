"""Whether all ranks hold the same value: the vote before anything changes."""

from __future__ import annotations

import torch
import torch.distributed as dist


class Vote:
    """One number of every rank, gathered on all of them. All ranks must start it together."""

    def __init__(self, value: int, group: dist.ProcessGroup, device: torch.device) -> None:
        own = torch.tensor([value], dtype=torch.int64, device=device)
        self._gathered = [torch.zeros_like(own) for _ in range(dist.get_world_size(group))]
        self._work = dist.all_gather(self._gathered, own, group=group, async_op=True)

    def values(self) -> list[int]:
        """Wait; by rank."""
        if self._work is not None:
            self._work.wait()
        return [int(value) for value in torch.cat(self._gathered).tolist()]

    def dissenters(self) -> list[int]:
        """Wait; the ranks whose value is not the most frequent one. Empty: all agree.

        Of values that are equally frequent that of the lowest rank counts as the majority, so
        that every rank finds the same dissenters.
        """
        values = self.values()
        majority = max(values, key=values.count)
        return [rank for rank, value in enumerate(values) if value != majority]

"""Votes: whether all ranks hold the same value, asked before anything changes."""

from __future__ import annotations

from collections.abc import Callable

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


def attempt(
    change: Callable[[], int], failed: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[list[int], str]:
    """Try ``change``, which answers with a vote, on all ranks together.

    Returns:
        All votes, by rank, ``failed`` where it raised an exception; and what that said on this one.
    """
    error = ""
    try:
        vote = change()
    except Exception as failure:
        # Not the exception itself: it may hold on to the memory that is short.
        vote, error = failed, f"{type(failure).__name__}: {failure}"
    return Vote(vote, group, device).values(), error

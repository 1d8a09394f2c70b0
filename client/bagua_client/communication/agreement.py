"""Votes: before anything changes, the ranks check that they all hold the same value.

A process that trains alone has no group, and none is made for it: it asks itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

Group = dist.ProcessGroup | None
"""The ranks that agree; None: this process alone. To torch None is the group of all ranks, so it is
given to none of torch's functions."""


def ranks_in(group: Group) -> int:
    """How many there are."""
    return 1 if group is None else dist.get_world_size(group)


def rank_in(group: Group) -> int:
    """This process's."""
    return 0 if group is None else dist.get_rank(group)


def destroy(group: Group) -> None:
    """Destroy a group that was made for the ranks to agree in. All of them call this together."""
    if group is not None:
        dist.destroy_process_group(group)


class Vote:
    """Gathers one integer of each rank on all ranks. All ranks must start it together."""

    def __init__(self, value: int, group: Group, device: torch.device) -> None:
        self._own, self._work = value, None
        self._gathered: list[torch.Tensor] = []
        if group is not None:
            own = torch.tensor([value], dtype=torch.int64, device=device)
            self._gathered = [torch.zeros_like(own) for _ in range(dist.get_world_size(group))]
            self._work = dist.all_gather(self._gathered, own, group=group, async_op=True)

    def values(self) -> list[int]:
        """Wait for the vote. Returns the values, by rank."""
        if self._work is not None:
            self._work.wait()
        return list(map(int, torch.cat(self._gathered).tolist())) if self._gathered else [self._own]

    def dissenters(self) -> list[int]:
        """Wait for the vote. Returns the ranks whose value is not the most frequent one; empty if
        all agree.

        Among equally frequent values, that of the lowest rank counts as the majority, so that
        every rank finds the same dissenters.
        """
        values = self.values()
        majority = max(values, key=values.count)
        return [rank for rank, value in enumerate(values) if value != majority]


def attempt(change: Callable[[], object], group: Group, device: torch.device) -> tuple[str, str]:
    """Try ``change`` on all ranks together.

    Returns:
        The ranks where it raised an exception, as in "0, 3" (empty: none), and the message of this
        rank's exception (empty if there was none).
    """
    error = ""
    try:
        change()
    except Exception as failure:
        # Keep only the text: the exception may hold references to memory, which may be short.
        error = f"{type(failure).__name__}: {failure}"
    votes = Vote(int(bool(error)), group, device).values()
    return ", ".join(str(rank) for rank, failed in enumerate(votes) if failed), error

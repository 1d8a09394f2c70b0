"""The order in which gradients become ready: recorded in the first steps, agreed by all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from bagua_client.communication.communicator import Communicator

RECORDED_STEPS = 2


class ReadyOrder:
    """Records for a few steps; then rank 0's record is everybody's.

    A tensor's place is the mean of its places in the recorded steps. One that was never ready
    stands last, as it did in ``initial``.
    """

    def __init__(self, initial: Sequence[int]) -> None:
        self._initial = initial
        self._places: dict[int, list[int]] = {}
        self._place = 0
        self._steps = 0

    def record(self, index: int) -> None:
        self._places.setdefault(index, []).append(self._place)
        self._place += 1

    def end_step(self) -> bool:
        """Whether enough has been recorded now."""
        self._place = 0
        self._steps += 1
        return self._steps >= RECORDED_STEPS

    def recorded(self) -> list[int]:
        """This rank's own record, as a permutation of ``initial``."""
        mean = {index: sum(places) / len(places) for index, places in self._places.items()}
        return sorted(self._initial, key=lambda index: mean.get(index, float("inf")))

    def agree(self, communicator: Communicator) -> tuple[int, ...]:
        """Rank 0's record. All ranks must call it together."""
        order = torch.tensor(self.recorded(), dtype=torch.int64, device=communicator.device)
        source = dist.get_global_rank(communicator.group, 0)
        dist.broadcast(order, src=source, group=communicator.group)
        return tuple(order.tolist())

"""Puts the ranks' step times together: a step is told once it has those of all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import zip_longest

from bagua_client.reporter.inbox import GatheredTimes
from bagua_client.service.client import StepTimes

MOST_WAITING_VALUES = 2**18
FEWEST_WAITING_STEPS = 64


class StepTable:
    """Collects the ranks' times; a step is complete when it has those of all ranks."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._rows: dict[int, dict[int, tuple[float, ...]]] = {}

    def add(self, gathered: GatheredTimes) -> list[StepTimes]:
        """Add times; return the steps that are complete now.

        Each rank tells its steps in order, so what is older than a complete step will never be
        complete (a message was dropped) and is forgotten. So are the oldest steps that wait too
        long for a rank that tells nothing.
        """
        for rank, times in enumerate(gathered.by_rank):
            first_step, *parts = times
            for step, told in enumerate(zip_longest(*parts, fillvalue=math.nan), first_step):
                self._rows.setdefault(step, {})[rank] = told
        complete = sorted(step for step, row in self._rows.items() if len(row) == self._world_size)
        found = [self._step(step) for step in complete]
        if complete:
            self._rows = {step: row for step, row in self._rows.items() if step > complete[-1]}
        most = max(FEWEST_WAITING_STEPS, MOST_WAITING_VALUES // self._world_size)
        for step in sorted(self._rows)[:-most]:
            del self._rows[step]
        return found

    def _step(self, step: int) -> StepTimes:
        row = self._rows[step]
        ranks = (row[rank] for rank in range(self._world_size))
        seconds, compute, complexities = zip(*ranks, strict=True)
        # Ranks that wait for one another all wait for the largest batch.
        complexity = max(complexities) if _are_known(complexities) else None
        computed = list(compute) if _are_known(compute) else None
        return StepTimes(step, list(seconds), computed, complexity)


def _are_known(values: Iterable[float]) -> bool:
    return not any(map(math.isnan, values))

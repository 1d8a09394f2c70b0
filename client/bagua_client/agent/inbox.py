"""What rank 0's training thread hands to its reporter thread, and how it never grows."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from bagua_client.agent.profiler import Recording
from bagua_client.service_client import StepTimes

LARGEST_INBOX = 512


class RankTimes(NamedTuple):
    """What one rank knew by now.

    Attributes:
        first_step: the number of the first step in ``seconds``.
        seconds: of that step and those after it.
        compute_seconds: how long of that the rank computed; NaN: it does not know. Empty after
            the tuning.
    """

    first_step: int
    seconds: Sequence[float]
    compute_seconds: Sequence[float] = ()


@dataclass(frozen=True)
class Samples:
    """Step times of all ranks.

    Attributes:
        trial: the index of the one they were measured under; None: after the tuning.
        by_rank: each rank's.
    """

    trial: int | None
    by_rank: list[RankTimes]


@dataclass(frozen=True)
class Event:
    """Something the service must know; the fields are API v2's."""

    kind: str
    trial: int | None
    step: int
    message: str
    seconds: float | None = None


Message = Samples | Recording | Event


class Inbox:
    """A queue whose writer never waits; with the service away the oldest messages are dropped,
    but no event."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._changed = threading.Condition()

    def put(self, message: Message) -> None:
        with self._changed:
            self._messages.append(message)
            if len(self._messages) > LARGEST_INBOX:
                oldest = next((m for m in self._messages if not isinstance(m, Event)), None)
                if oldest is not None:
                    self._messages.remove(oldest)
            self._changed.notify()

    def wake(self) -> None:
        """Let a reader that waits come back at once."""
        with self._changed:
            self._changed.notify()

    def take(self, timeout_seconds: float) -> Message | None:
        """The oldest message; None if none comes in time."""
        with self._changed:
            if not self._messages:
                self._changed.wait(timeout_seconds)
            return self._messages.popleft() if self._messages else None


class StepTable:
    """Puts the ranks' samples of a trial together; a step is complete when all ranks knew it."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._trial: int | None = None
        self._rows: dict[int, dict[int, tuple[float, float]]] = {}

    def add(self, samples: Samples) -> list[StepTimes]:
        """Add samples; the steps that are complete now.

        Each rank tells its steps in order, so what is older than a complete step will never be
        complete (a message was dropped) and is forgotten, as is what is left of another trial.
        """
        if samples.trial != self._trial:
            self._trial, self._rows = samples.trial, {}
        for rank, times in enumerate(samples.by_rank):
            pairs = zip_longest(times.seconds, times.compute_seconds, fillvalue=math.nan)
            for step, pair in enumerate(pairs, times.first_step):
                self._rows.setdefault(step, {})[rank] = pair
        complete = sorted(step for step, row in self._rows.items() if len(row) == self._world_size)
        found = [self._step(step) for step in complete]
        if complete:
            self._rows = {step: row for step, row in self._rows.items() if step > complete[-1]}
        return found

    def _step(self, step: int) -> StepTimes:
        row = self._rows[step]
        seconds, compute = zip(*(row[rank] for rank in range(self._world_size)), strict=True)
        is_known = not any(map(math.isnan, compute))
        return StepTimes(step, list(seconds), list(compute) if is_known else None)

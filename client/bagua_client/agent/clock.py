"""The time on the model's device, without ever making the training thread wait for it."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks moments; what lies between two marks is known once the device has passed them."""

    def mark(self) -> Any:
        """A mark of now, in the current stream."""

    def is_known(self, mark: Any) -> bool:
        """Whether the device has passed the mark."""

    def seconds(self, begin: Any, end: Any) -> float:
        """The time between two marks that are known."""


def clock_for(device: torch.device) -> Clock:
    """The clock for a model on ``device``."""
    return CudaClock() if device.type == "cuda" else CpuClock()


class CpuClock:
    """On the CPU the work is done when the call returns."""

    mark = staticmethod(time.perf_counter)

    def is_known(self, mark: float) -> bool:
        return True

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class CudaClock:
    """Marks are events, which are asked for their time once the device has passed them."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def is_known(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(begin.elapsed_time(end)) / 1e3


class StepTimer:
    """How long each step takes. Ticks once at the end of each step's communication."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._mark = clock.mark
        self._ends: deque[tuple[int, Any]] = deque()

    def tick(self, step: int) -> None:
        """Step ``step`` ends now."""
        self._ends.append((step, self._mark()))

    def drain(self) -> list[tuple[int, float]]:
        """The steps whose time is known by now, oldest first: (step, seconds). Nobody knows how
        long the first one took."""
        known = []
        while len(self._ends) > 1 and self._clock.is_known(self._ends[1][1]):
            _, begin = self._ends.popleft()
            step, end = self._ends[0]
            known.append((step, self._clock.seconds(begin, end)))
        return known

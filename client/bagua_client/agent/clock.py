"""How long each step takes, without ever making the training thread wait for the device."""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol

import torch


class Clock(Protocol):
    """Ticks once at the end of each step's communication."""

    def tick(self, step: int) -> None:
        """Step ``step`` ends now."""

    def drain(self) -> list[tuple[int, float]]:
        """The steps whose time is known by now, oldest first: (step, seconds). Nobody knows how
        long the first one took."""


def clock_for(device: torch.device) -> Clock:
    """The clock for a model on ``device``."""
    return CudaClock() if device.type == "cuda" else CpuClock()


class CpuClock:
    """On the CPU the work is done when the call returns."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._known: list[tuple[int, float]] = []

    def tick(self, step: int) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self._known.append((step, now - self._last))
        self._last = now

    def drain(self) -> list[tuple[int, float]]:
        known, self._known = self._known, []
        return known


class CudaClock:
    """Records an event in the stream at each tick and reads it when the device has passed it."""

    def __init__(self) -> None:
        self._events: deque[tuple[int, torch.cuda.Event]] = deque()

    def tick(self, step: int) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append((step, event))

    def drain(self) -> list[tuple[int, float]]:
        known = []
        while len(self._events) > 1 and self._events[1][1].query():  # type: ignore[no-untyped-call]
            _, begin = self._events.popleft()
            step, end = self._events[0]
            known.append((step, begin.elapsed_time(end) / 1e3))
        return known

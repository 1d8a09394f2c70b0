"""The time on the model's device, without ever making the training thread wait for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

MOST_WAITS = 64
"""In one step; of one that has more (passes that nothing is learned from) the computing is not
known."""


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


class StepTime(NamedTuple):
    """How long a step took, and how long of it this rank computed; None: that is not known."""

    step: int
    seconds: float
    compute_seconds: float | None


class _Computed(NamedTuple):
    """The mark of its end, and those of the begin and the end of each wait in it."""

    mark: Any
    waits: list[tuple[Any, Any]]


class StepTimer:
    """How long each step takes, and how long of that this rank computes by itself.

    A step lasts from the end of one communication to the end of the next; its computing ends
    where the last gradient is ready. Ranks that wait for one another all take as long as the
    slowest: only their computing tells which that is.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._mark = clock.mark
        self._ends: deque[tuple[int, Any, _Computed | None]] = deque()
        self._computed: _Computed | None = None
        self._waits: list[tuple[Any, Any]] = []
        self._communicated_before = False

    def computed(self) -> None:
        """The last gradient of this rank is ready: from now on it only communicates."""
        is_known = not self._communicated_before and len(self._waits) <= MOST_WAITS
        self._computed = _Computed(self._mark(), self._waits) if is_known else None
        self._waits, self._communicated_before = [], False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A communication in the middle of the computing, which is not counted as that."""
        if len(self._waits) > MOST_WAITS:
            yield
            return
        began = self._mark()
        yield
        self._waits.append((began, self._mark()))

    def tick(self, step: int) -> None:
        """Step ``step`` ends now."""
        self._ends.append((step, self._mark(), self._computed))
        self._computed = None

    def tick_within(self) -> None:
        """The end of one more communication of the step: it falls into the time of the next,
        whose computing is then not known."""
        self._computed, self._communicated_before = None, True

    def drain(self) -> list[StepTime]:
        """The steps whose time is known by now, oldest first. Nobody knows how long the first
        one took."""
        known = []
        while len(self._ends) > 1 and self._clock.is_known(self._ends[1][1]):
            _, begin, _ = self._ends.popleft()
            step, end, computed = self._ends[0]
            seconds = self._clock.seconds(begin, end)
            compute_seconds = computed and self._compute_seconds(begin, computed, seconds)
            known.append(StepTime(step, seconds, compute_seconds))
        return known

    def _compute_seconds(
        self, begin: Any, computed: _Computed, step_seconds: float
    ) -> float | None:
        marks = (computed.mark, *(mark for wait in computed.waits for mark in wait))
        if not all(map(self._clock.is_known, marks)):
            return None
        waited = sum(self._clock.seconds(*wait) for wait in computed.waits)
        # Marks in several streams may be passed in another order than they were made in.
        return min(max(self._clock.seconds(begin, computed.mark) - waited, 0.0), step_seconds)

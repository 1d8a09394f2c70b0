"""Times steps on the model's device; the training thread never waits for the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

MOST_WAITS = 1024
"""Most waits in one step: a sharded model has two for each unit in each micro-batch. In a step that
has more (passes that nothing is learned from) the computing is not known.
"""


class Clock(Protocol):
    """Makes marks; the time between two of them is known once the device has passed both."""

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
    """The clock of the CPU, where work is done when the call returns."""

    mark = staticmethod(time.perf_counter)

    def is_known(self, mark: float) -> bool:
        return True

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class CudaClock:
    """Marks are CUDA events, whose times are read once the device has passed them."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def is_known(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(begin.elapsed_time(end)) / 1e3


class StepTime(NamedTuple):
    """How long a step took, how long of it this rank computed, and the complexity of its batches;
    None: that is not known."""

    step: int
    seconds: float
    compute_seconds: float | None
    complexity: float | None = None


Intervals = list[tuple[Any, Any]]
"""The begin and the end of each interval, as marks."""


class _Computed(NamedTuple):
    """The mark of its end, and the waits in it."""

    mark: Any
    waits: Intervals


class _End(NamedTuple):
    """The end of a step: its mark, what in the step was not its own, and what was told of its
    batches."""

    step: int
    mark: Any
    computed: _Computed | None
    left_out: Intervals
    complexity: float | None


class StepTimer:
    """Measures how long each step takes, and how long of that this rank computes by itself.

    A step lasts from the end of one communication to the end of the next; its computing ends
    where the last gradient is ready. Ranks that wait for one another all take as long as the
    slowest: only their computing tells which that is. What is ``unmeasured`` is no part of either.
    Of a step of several passes that communicate, what follows each pass's last gradient is a wait.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._mark = clock.mark
        self._ends: deque[_End] = deque()
        self._computed: _Computed | None = None
        self._waits: Intervals = []
        self._left_out: Intervals = []
        self._stepped: Any = None
        self._left_out_from: Any = None
        self._is_lost = False

    def computed(self) -> None:
        """The last gradient of this rank is ready: from now on it only communicates."""
        is_known = not self._is_lost and len(self._waits) <= MOST_WAITS
        self._computed = _Computed(self._mark(), self._waits) if is_known else None
        self._waits = []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A communication in the middle of the computing, which is not counted as that."""
        if len(self._waits) > MOST_WAITS:
            yield
            return
        began = self._mark()
        yield
        self._waits.append((began, self._mark()))

    def stepped(self) -> None:
        """An optimizer has stepped."""
        self._stepped = self._mark()

    @contextmanager
    def unmeasured(self) -> Iterator[None]:
        """Leave the block out of the step's time, from the optimizers' last step on, which it
        follows: nobody knows before whether it will, and workers of a data loader may have been
        started since.
        """
        if self._left_out_from is not None:
            yield
            return
        self._left_out_from = self._mark() if self._stepped is None else self._stepped
        try:
            yield
        finally:
            if self._left_out_from is not None and len(self._left_out) < MOST_WAITS:
                self._left_out.append((self._left_out_from, self._mark()))
            self._left_out_from = self._stepped = None

    def tick(self, step: int, complexity: float | None = None) -> None:
        """Step ``step`` ends now."""
        self._ends.append(_End(step, self._mark(), self._computed, self._left_out, complexity))
        self._computed, self._left_out = None, []
        self._stepped = self._left_out_from = None
        # Waits since the last gradient was ready are over, and lie before the next step.
        self._waits, self._is_lost = [], False

    def tick_within(self) -> None:
        """The end of one more communication of the step: it falls into the time of the next."""
        if self._computed is None:
            self._is_lost = True
        else:
            self._waits = [*self._computed.waits, (self._computed.mark, self._mark())]
        self._computed = None

    def drain(self) -> list[StepTime]:
        """The steps whose time is known by now, oldest first. Nobody knows how long the first
        one took."""
        known = []
        while len(self._ends) > 1 and self._are_known(self._ends[1].mark, self._ends[1].left_out):
            begin, end = self._ends.popleft().mark, self._ends[0]
            seconds = self._clock.seconds(begin, end.mark) - self._total(end.left_out)
            compute_seconds = end.computed and self._compute_seconds(begin, end, seconds)
            known.append(StepTime(end.step, seconds, compute_seconds, end.complexity))
        return known

    def _are_known(self, mark: Any, intervals: Intervals) -> bool:
        return all(
            map(self._clock.is_known, (mark, *(m for interval in intervals for m in interval)))
        )

    def _total(self, intervals: Intervals) -> float:
        return sum(self._clock.seconds(*interval) for interval in intervals)

    def _compute_seconds(self, begin: Any, end: _End, step_seconds: float) -> float | None:
        computed = end.computed
        if computed is None or not self._are_known(computed.mark, computed.waits):
            return None
        waited = self._total(computed.waits) + self._total(end.left_out)
        # Marks in several streams may be passed in another order than they were made in.
        return min(max(self._clock.seconds(begin, computed.mark) - waited, 0.0), step_seconds)

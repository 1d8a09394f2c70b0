"""Records a few steps of each trial in detail, for the service's model of what steps cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bagua_client.agent.clock import Clock
from bagua_client.buckets.layout import TensorSpec
from bagua_client.reducer.reducer import Reducer
from bagua_client.reducer.timeline import Timeline
from bagua_client.service_client import BucketTiming, Profile

PROFILED_STEPS = 3
"""Of each trial, the first ones that are measured."""


@dataclass(frozen=True)
class Recording:
    """A step that was recorded; reading it takes a moment, so another thread may do that.

    Attributes:
        began: mark of the end of the previous step's communication.
        ended: mark of the end of this one's.
        tensors: of the model.
        order: the registered ones, by their index in ``tensors``.
        partition: the buckets, as such indices.
    """

    trial: int
    step: int
    clock: Clock
    timeline: Timeline
    began: Any
    ended: Any
    tensors: Sequence[TensorSpec]
    order: Sequence[int]
    partition: Sequence[Sequence[int]]

    @property
    def is_known(self) -> bool:
        """Whether the device has passed all its marks."""
        ends = self.timeline.ended
        return len(ends) == len(self.partition) and all(
            self.clock.is_known(mark) for mark in (self.ended, *ends.values())
        )

    def read(self) -> Profile:
        """The profile; only once it is known."""
        ready = self._ready_seconds()
        step_seconds = self._seconds(self.ended)
        last = max(ready.values())
        buckets: list[BucketTiming] = []
        for place, indices in enumerate(self.partition):
            mark = self.timeline.started[place]
            # A bucket begins when its last tensor is ready and those before it have begun.
            begins = max(ready.get(index, last) for index in indices)
            started = begins if mark is None else self._seconds(mark)
            if buckets:
                started = max(started, buckets[-1].started_seconds)
            # Its end is marked in a stream of its own, which may come a little later.
            ended = min(self._seconds(self.timeline.ended[place]), step_seconds)
            size = sum(self.tensors[index].bytes for index in indices)
            buckets.append(BucketTiming(size, min(started, ended), ended))
        ready_seconds = [ready.get(index, last) for index in self.order]
        return Profile(self.trial, self.step, step_seconds, ready_seconds, buckets)

    def _ready_seconds(self) -> dict[int, float]:
        """By tensor; between two marks the tensors are taken to be ready at even distances."""
        order = self.timeline.order
        marks = [(place, self._seconds(mark)) for place, mark in self.timeline.ready.items()]
        ready = {order[place]: seconds for place, seconds in marks}
        for (first, began), (last, ended) in pairwise(marks):
            for place in range(first + 1, last):
                share = (place - first) / (last - first)
                ready[order[place]] = began + share * (ended - began)
        return ready

    def _seconds(self, mark: Any) -> float:
        return self.clock.seconds(self.began, mark)


class Profiler:
    """Chooses the steps; rank 0 alone has one.

    Args:
        reducer: of the model.
        clock: of the device that the model is on.
    """

    def __init__(self, reducer: Reducer, clock: Clock) -> None:
        self._reducer = reducer
        self._clock = clock
        self._trial = 0
        self._steps = range(0)
        self._began: Any = None
        self._recordings: list[Recording] = []

    def begin_trial(self, trial: int, first_step: int) -> None:
        """Record ``first_step``, the first one that is measured, and those after it."""
        self.stop()
        self._trial, self._steps = trial, range(first_step, first_step + PROFILED_STEPS)

    def stop(self) -> None:
        """Record nothing (more), and forget what nobody took."""
        self._steps = range(0)
        self._reducer.timeline = None
        self._recordings.clear()

    def reduction_done(self, step: int, is_first: bool) -> None:
        """The end of step ``step``'s communication.

        Args:
            is_first: of the step's reductions; a step of several is not recorded.
        """
        timeline, self._reducer.timeline = self._reducer.timeline, None
        if timeline is not None and is_first:
            self._keep(step, timeline)
        if step + 1 in self._steps and is_first:
            self._began = self._clock.mark()
            self._reducer.timeline = Timeline(
                self._clock.mark, len(self._reducer.tensors), self._clock.most_marks
            )

    def take(self) -> Recording | None:
        """The oldest step that is known by now and was not taken yet."""
        if self._recordings and self._recordings[0].is_known:
            return self._recordings.pop(0)
        return None

    def _keep(self, step: int, timeline: Timeline) -> None:
        reducer = self._reducer
        self._recordings.append(
            Recording(
                trial=self._trial,
                step=step,
                clock=self._clock,
                timeline=timeline,
                began=self._began,
                ended=self._clock.mark(),
                tensors=reducer.tensors,
                order=reducer.order,
                partition=reducer.layout.partition,
            )
        )

"""Records a few steps of each trial in detail, for the service's model of what steps cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bagua_client.measuring.clock import Clock
from bagua_client.tunable.tunable import Timeline, Tunable
from bagua_wire.profile import BucketTiming, GatherTiming, Profile

PROFILED_STEPS = 3
"""The number of profiled steps of a trial, from its first one on."""


@dataclass(frozen=True)
class Recording:
    """A step that was recorded; reading it takes a moment, so another thread may do that.

    Attributes:
        began: mark of the end of the previous step's communication.
        ended: mark of the end of this one's.
        order: the registered tensors, by their index in the model.
    """

    trial: int
    step: int
    clock: Clock
    timeline: Timeline
    began: Any
    ended: Any
    order: Sequence[int]

    @property
    def is_known(self) -> bool:
        """Whether the device has passed all its marks."""
        ends = [*self.timeline.ended.values(), *(g.ended for g in self.timeline.gathers)]
        return len(self.timeline.ended) == len(self.timeline.started) and all(
            mark is not None and self.clock.is_known(mark) for mark in (self.ended, *ends)
        )

    def read(self) -> Profile:
        """The profile; only once it is known."""
        line = self.timeline
        ready = {index: self._seconds(mark) for index, mark in line.ready.items()}
        last = max(ready.values())
        step_seconds = self._seconds(self.ended)
        # A bucket's end is marked in a stream of its own, which may come a little later.
        ended = [min(self._seconds(mark), step_seconds) for _, mark in sorted(line.ended.items())]
        buckets = tuple(
            BucketTiming(size, self._seconds(start), end)
            for size, start, end in zip(line.bucket_bytes, line.started, ended, strict=True)
        )
        ready_seconds = tuple(ready.get(index, last) for index in self.order)
        places = {index: place for place, index in enumerate(self.order)}
        gathers = tuple(
            GatherTiming(
                places[g.index],
                g.size_bytes,
                self._seconds(g.started),
                min(self._seconds(g.ended), step_seconds),
            )
            for g in line.gathers
        )
        return Profile(self.step, step_seconds, ready_seconds, buckets, gathers)

    def _seconds(self, mark: Any) -> float:
        return self.clock.seconds(self.began, mark)


class Profiler:
    """Chooses the steps; rank 0 alone has one.

    Args:
        tunable: of the model.
        clock: of the device that the model is on.
    """

    def __init__(self, tunable: Tunable, clock: Clock) -> None:
        self._tunable = tunable
        self._clock = clock
        self._takes_several = tunable.offer.kind == "sharded"
        self._trial = 0
        self._steps = range(0)
        self._began: Any = None
        self._timeline: Timeline | None = None
        self._recordings: list[Recording] = []

    def begin_trial(self, trial: int, steps: range) -> None:
        """Record these steps of a trial that begins."""
        self.stop()
        self._trial, self._steps = trial, steps

    def postpone(self) -> None:
        """Record the next step instead: what came before this one was no part of it."""
        if self._timeline is not None:
            self._timeline = None
            self._tunable.record(None)
            self._steps = range(self._steps.start, self._steps.stop + 1)

    def leave(self) -> None:
        """Record no more of the trial: the next step is not its own."""
        self._steps = range(0)
        self._timeline = None
        self._tunable.record(None)

    def stop(self) -> None:
        """Record nothing (more), and forget what nobody took."""
        self.leave()
        self._recordings.clear()

    def reduction_done(self, step: int, is_first: bool) -> None:
        """The end of step ``step``'s communication.

        Args:
            is_first: of the step's reductions. A step of several is recorded where what travels
                is known, as in a sharded model's micro-batches; else it is not.
        """
        if not is_first and self._takes_several:
            return
        timeline, self._timeline = self._timeline, None
        # Nothing can be learned from a step that has used no parameter on this rank, or whose
        # buckets were not observed.
        if timeline is not None and timeline.ready and timeline.started and is_first:
            self._recordings.append(
                Recording(
                    trial=self._trial,
                    step=step,
                    clock=self._clock,
                    timeline=timeline,
                    began=self._began,
                    ended=self._clock.mark(),
                    order=self._tunable.order,
                )
            )
        if step + 1 in self._steps and is_first:
            self._began = self._clock.mark()
            self._timeline = Timeline(self._clock.mark)
        if timeline is not self._timeline:
            self._tunable.record(self._timeline)

    def take(self) -> Recording | None:
        """The oldest step that is known by now and was not taken yet."""
        if self._recordings and self._recordings[0].is_known:
            return self._recordings.pop(0)
        return None

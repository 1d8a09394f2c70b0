"""One rank's measurement: the times of all its steps, and a few steps of each trial in detail."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import NamedTuple

import torch

from bagua_client.communication.nccl import GROUPS_BY_NODE
from bagua_client.configuration import Configuration
from bagua_client.measuring.batch_complexity import BatchComplexity
from bagua_client.measuring.boundary import StepBoundary
from bagua_client.measuring.clock import StepTime, StepTimer, clock_for
from bagua_client.measuring.profiler import PROFILED_STEPS, Profiler, Recording
from bagua_client.tunable.tunable import Tunable

SLOWED_DEVICES = ("cuda",)
"""Types of devices on which recording slows a step, so that a recorded one is not measured: with 8
and 16 channels over TCP a recorded step of BERT-base and VGG16 took up to a third longer, with 4 no
longer (reports/2026-11-gpus.md)."""

MOST_RECORDED_GROUPS = 6
"""Process groups that may be in use at once in a step that is recorded on such a device. With 8,
and 12 by node, recordings show buckets one after another; probably because there are then more
streams than the eight queues that CUDA has by default, and a mark waits for what others send."""


class Span(NamedTuple):
    """The steps of a trial, or, where that is None, those after the tuning."""

    trial: int | None
    first: int
    last: int = sys.maxsize

    @property
    def is_in_force(self) -> bool:
        """Whether more of them may follow."""
        return self.last == sys.maxsize


class StepCount:
    """Counts the steps that a training made. It knows nothing of the model, so that who keeps it
    does not keep the model.
    """

    made = 0


class RankMeasurement:
    """The measurement of one model on one rank.

    Args:
        tunable: of the model.
        optimizers: of the model, as far as they are known; their steps tell the model's.
        records: whether this rank measures some steps in detail.
        counts_recorded: whether these are measured, too, although it may slow them.

    Attributes:
        count: of its steps.
        complexity: of the batches in the step under way.
        spans: the steps of what is in force, and of what was left before it.
    """

    def __init__(
        self,
        tunable: Tunable,
        optimizers: Iterable[torch.optim.Optimizer],
        records: bool = True,
        counts_recorded: bool = False,
    ) -> None:
        communicator = tunable.communicator
        self.count = StepCount()
        self.complexity = BatchComplexity()
        self.spans: list[Span] = []
        self._tunable = tunable
        self._samples: list[StepTime] = []
        clock = clock_for(communicator.device)
        self._timer = StepTimer(clock)
        self._observers = tunable.observers
        self._boundary = StepBoundary(
            tunable.parameters, optimizers, self._timer.stepped, self._observers
        )
        # The marks of several devices cannot be compared.
        is_on_one_device = {t.device for t in tunable.tensors} == {f"{communicator.device.type}#0"}
        self._computed = self._timer.computed if is_on_one_device else None
        self._profiler = Profiler(tunable, clock) if records and is_on_one_device else None
        is_slowed = is_on_one_device and communicator.device.type in SLOWED_DEVICES
        self._is_apart = is_slowed and not counts_recorded
        self._recorded: set[Configuration] = set()

    @property
    def step(self) -> int:
        """The number of the one that the last reduction belongs to."""
        return self.count.made

    def follow(self) -> None:
        """Be told by the model how long it computes and waits."""
        self._tunable.observation.on_last_ready = self._computed
        if self._computed is not None:
            self._tunable.waiting = partial(self._observers.around, self._timer.waiting)

    def tell_complexity(self, complexity: torch.Tensor | float) -> None:
        """See :meth:`BatchComplexity.tell`."""
        self._observers.tell(self.complexity.tell, complexity)

    def unmeasured(self) -> AbstractContextManager[None]:
        """Around what is no part of a step, between two of them."""
        return self._observers.around(self._unmeasured)

    @contextmanager
    def _unmeasured(self) -> Iterator[None]:
        with self._timer.unmeasured():
            yield
        if self._profiler is not None:
            self._profiler.postpone()

    def tick(self) -> bool:
        """A reduction has ended; whether it is the first one of a step."""
        begins = self._boundary.begins()
        if begins:
            self.count.made += 1
            self._timer.tick(self.step, self.complexity.take())
        else:
            self._timer.tick_within()
        return begins

    def record(self, begins: bool) -> None:
        """The same reduction, in detail; only while the job is tuned."""
        if self._profiler is not None:
            self._profiler.reduction_done(self.step, begins)

    def begin(self, trial: int | None, in_detail: bool = True) -> None:
        """Begin to measure: what was commanded is in force, and will stay as it is.

        Args:
            in_detail: whether buckets are observed too, so that steps can be recorded.
        """
        # Two steps at least are left out, where torch needed but one for its own part of a re-cut.
        first = self.step + 1
        if in_detail and trial is not None:
            steps = self._steps_to_record()
            self.begin_recording(trial, steps)
            first += steps if self._is_apart else 0
        self.spans = [*self.spans[-1:], Span(trial, first)]

    def begin_recording(self, trial: int, steps: int = PROFILED_STEPS) -> None:
        """Record so many steps of a trial, from the next one on, in detail."""
        self._recorded.add(self._tunable.layout.configuration)
        if self._profiler is not None:
            first = self.step + 1
            self._profiler.begin_trial(trial, range(first, first + steps))

    def _steps_to_record(self) -> int:
        """Of the trial that begins; equal on all ranks, of which one records. Where the steps are
        then not measured, most trials have but one, and visits after a configuration's first none.
        """
        if not (self._is_apart and self._recorded):
            return PROFILED_STEPS
        found = self._tunable.layout.configuration
        groups = found.channels * (1 if found.hierarchical == "off" else GROUPS_BY_NODE)
        is_odd = groups > MOST_RECORDED_GROUPS and self._tunable.offer.kind == "replicated"
        return 0 if is_odd or found in self._recorded else 1

    def leave(self, forgets: bool) -> None:
        """What is in force is left: its last steps may become known later.

        Args:
            forgets: what was measured and not told yet is of no use.
        """
        self.spans = [] if forgets else [span._replace(last=self.step) for span in self.spans[-1:]]
        if forgets:
            self._samples.clear()
        if self._profiler is not None:
            self._profiler.leave()

    def take(self, wanted: bool, most: int) -> Sequence[StepTime]:
        """Return new step times, at most so many; none where they are of no use.

        A device tells the last steps before a switch some steps after it, so those come too, and
        the steps of the switch in between.
        """
        first = self.spans[0].first if self.spans else sys.maxsize
        new = [time for time in self._timer.drain() if time.step >= first]
        self._samples += new if wanted else []
        taken, self._samples = self._samples[:most], self._samples[most:]
        return taken

    def take_recordings(self) -> Iterable[Recording]:
        """Return what was recorded in detail and is known by now."""
        while self._profiler is not None and (recording := self._profiler.take()) is not None:
            yield recording

    def stop_recording(self) -> None:
        """The round is over: step times are all that is measured. A later one learns anew."""
        self._recorded.clear()
        self._tunable.observation.on_last_ready = None
        if self._profiler is not None:
            self._profiler.stop()

    def close(self) -> None:
        """Close: from now on a step costs nothing."""
        self._boundary.close()
        if self._profiler is not None:
            self._profiler.stop()

"""One rank's measurement: the times of all its steps, and a few steps of each trial in detail."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from numbers import Real
from typing import NamedTuple
from weakref import ref

import torch

from bagua_client.communication.process_groups import GROUPS_BY_NODE
from bagua_client.configuration import Configuration
from bagua_client.measuring.clock import StepTime, StepTimer, clock_for
from bagua_client.measuring.profiler import PROFILED_STEPS, Profiler, Recording
from bagua_client.torch_private.optimizer import at_each_step
from bagua_client.tunable.looks import Observers
from bagua_client.tunable.tunable import Nobody, Tunable

# Where one step ends and the next begins: at the optimizer, not at each backward pass.


class StepBoundary:
    """Watches the optimizers of some parameters; optimizers that are not given are found when they
    step. Which of ours one holds is looked up in each of its steps, as that may change:
    by ``add_param_group``, or where a training puts other parameters into a group.

    A loop may run several backward passes for one step (a GAN's discriminator does); timing
    each would compare unlike with unlike.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        optimizers: Iterable[torch.optim.Optimizer] = (),
        on_step: Callable[[], None] = lambda: None,
        observers: Observers | None = None,
    ) -> None:
        self._ours = {id(parameter) for parameter in parameters}
        self._given = [ref(optimizer) for optimizer in optimizers]
        self._found: list[ref[torch.optim.Optimizer]] = []
        self._stepped = True
        self._on_step = on_step
        self._observers = observers or Observers()
        self._handle = at_each_step(self._stepped_one)

    def begins(self) -> bool:
        """Whether the reduction that just ended is the first one of a step.

        Every one is, where no torch optimizer holds the parameters.
        """
        begins, self._stepped = self._stepped, True
        for reference in (*self._given, *self._found):
            if reference() is not None:
                self._stepped = False
        return begins

    def close(self) -> None:
        """Watch no longer."""
        self._handle.remove()

    def _stepped_one(self, optimizer: torch.optim.Optimizer) -> None:
        self._observers.call(self._after_step, optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        is_known = _holds(self._found, optimizer)
        if _holds(self._given, optimizer) or self._has_ours(optimizer):
            if not is_known:
                self._found.append(ref(optimizer))
            self._stepped = True
            self._on_step()
        elif is_known:
            self._found = [each for each in self._found if each() is not optimizer]

    def _has_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        groups = optimizer.param_groups
        return not all(self._ours.isdisjoint(map(id, group["params"])) for group in groups)


def _holds(
    references: Iterable[ref[torch.optim.Optimizer]], optimizer: torch.optim.Optimizer
) -> bool:
    """Whether one is this optimizer, by identity: an optimizer may compare as it likes."""
    return any(reference() is optimizer for reference in references)


# How much is in one rank's batches: what the training reports, else what its model is given.

logger = logging.getLogger(__name__)

LARGEST = 1e18


class BatchComplexity:
    """The complexity of this rank's batches since the end of the last step's communication. Several
    add up, as those do whose gradients are accumulated. Until the training has told it for the
    first time, it is the number of elements in the model's inputs."""

    def __init__(self) -> None:
        self._sum: float | None = None
        self._inputs: float | None = None
        self._is_told = False
        self._has_warned = False

    def tell(self, complexity: float | torch.Tensor) -> None:
        """Add that of one batch. A negative or infinite number, or NaN, makes the step's unknown.

        Raises:
            TypeError: neither a number nor a tensor of one on the CPU.
        """
        if isinstance(complexity, torch.Tensor):
            if complexity.device.type != "cpu" or complexity.numel() != 1:
                raise TypeError(
                    "a complexity must be a number, or a tensor of one number on the CPU; on a GPU "
                    f"the training would wait for it. This is a tensor of {complexity.numel()} "
                    f"on {complexity.device}"
                )
            complexity = complexity.item()
        if not isinstance(complexity, Real):
            raise TypeError(f"a complexity must be a number, not {type(complexity).__name__}")
        told = float(complexity)
        if not 0 <= told <= LARGEST and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "autotune: a batch's complexity of %g is left out: it must be from 0 to %g",
                *(told, LARGEST),
            )
        self._is_told = True
        # NaN stays in the sum.
        self._sum = (self._sum or 0.0) + (told if 0 <= told <= LARGEST else math.nan)

    def see_inputs(self, elements: float) -> None:
        """Add those of a forward pass; NaN: how many elements they have is not known."""
        self._inputs = (self._inputs or 0.0) + elements

    def take(self) -> float | None:
        """The complexity of the step that ends now; negative: of the model's inputs, in their unit;
        None: it is not known."""
        found = self._sum if self._is_told else self._inputs
        self._sum = self._inputs = None
        if found is None or not found <= LARGEST:
            return None
        return found if self._is_told else -found


SLOWED_DEVICES = ("cuda",)
"""Types of devices on which recording slows a step, so that a recorded one is not measured: with 8
and 16 channels over TCP a recorded step of BERT-base and VGG16 took up to a third longer, with 4 no
longer (reports/2026-11-gpus.md)."""

MOST_RECORDED_GROUPS = 6
"""Process groups that may be in use at once in a step that is recorded on such a device. With 8,
and 12 by node, recordings show buckets one after another; probably because there are then more
streams than the eight queues that CUDA has by default, and a mark waits for what others send."""


MOST_AWAITED = 16
"""So many reductions more than twice those of the step before, and a step is taken for endless."""


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
        self._reductions_in_step = self._reductions_before = 1
        clock = clock_for(communicator.device)
        self._timer = StepTimer(clock)
        self._observers = tunable.observers
        self._boundary = StepBoundary(
            tunable.parameters, optimizers, self._timer.stepped, self._observers
        )
        # The marks of several devices cannot be compared.
        is_on_one_device = {t.device for t in tunable.tensors} == {f"{communicator.device.type}#0"}
        self._times_parts, self._is_followed = is_on_one_device, False
        self._profiler = Profiler(tunable, clock) if records and is_on_one_device else None
        is_slowed = is_on_one_device and communicator.device.type in SLOWED_DEVICES
        self._is_apart = is_slowed and not counts_recorded
        self._recorded: set[Configuration] = set()

    @property
    def step(self) -> int:
        """The number of the one that the last reduction belongs to."""
        return self.count.made

    def follow(self) -> None:
        """Measure from now on how long of each step the rank computes."""
        self._is_followed = self._times_parts

    def computed(self) -> None:
        """The rank has computed its part of the step."""
        if self._is_followed:
            self._timer.computed()

    def waiting(self) -> AbstractContextManager[None]:
        """Around a communication in the middle of the computing."""
        return self._observers.around(self._timer.waiting) if self._times_parts else nullcontext()

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
            self._reductions_before, self._reductions_in_step = self._reductions_in_step, 1
            self.count.made += 1
            self._timer.tick(self.step, self.complexity.take())
        else:
            self._reductions_in_step += 1
            self._timer.tick_within()
        return begins

    @property
    def may_be_left(self) -> bool:
        """Whether the trial that is measured may end. One of steps with several reductions has two
        of them at least: the next command may come in the same. A step that does not end, as its
        optimizer is not used any more, is not waited for."""
        several = max(self._reductions_in_step, self._reductions_before) > 1
        is_endless = self._reductions_in_step > 2 * self._reductions_before + MOST_AWAITED
        if not self.spans or not several or is_endless:
            return True
        return not self.spans[-1].is_in_force or self.step > self.spans[-1].first

    def record(self, begins: bool) -> None:
        """Record a reduction in detail, after its ``tick``; only while the job is tuned."""
        if self._profiler is not None:
            self._profiler.reduction_done(self.step, begins)

    def begin(self, trial: int | None, in_detail: bool = True, is_new: bool = True) -> None:
        """Begin to measure: what was commanded is in force, and will stay as it is.

        Args:
            in_detail: whether buckets are observed too, so that steps can be recorded.
            is_new: else it has been in force for a whole step.
        """
        # The last switch may have been in the middle of the step whose time is taken now, which
        # began with the first reduction of the one before.
        first = self.step + (2 if is_new and self._reductions_in_step > 1 else 1)
        if in_detail and trial is not None:
            steps = self._steps_to_record()
            self.begin_recording(trial, steps, first)
            first += steps if self._is_apart else 0
        self.spans = [*self.spans[-1:], Span(trial, first)]

    def begin_recording(
        self, trial: int, steps: int = PROFILED_STEPS, first: int | None = None
    ) -> None:
        """Record so many steps of a trial in detail.

        Args:
            first: the number of the first; None: the next one.
        """
        self._recorded.add(self._tunable.layout.configuration)
        if self._profiler is not None:
            first = self.step + 1 if first is None else first
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
        self._is_followed = False
        if self._profiler is not None:
            self._profiler.stop()

    def close(self) -> None:
        """Close: from now on a step costs nothing."""
        self._boundary.close()
        if self._profiler is not None:
            self._profiler.stop()


class Measures(Nobody):
    """Who listens to a model, and measures its steps.

    Attributes:
        measurement: of this rank's steps.
    """

    measurement: RankMeasurement

    def given(self, elements: float) -> None:
        self.measurement.complexity.see_inputs(elements)

    def computed(self) -> None:
        self.measurement.computed()

    def waiting(self) -> AbstractContextManager[None]:
        return self.measurement.waiting()

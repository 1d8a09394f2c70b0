"""The message of every rank to all others: its new step times, and from rank 0 the command; how
often it is sent, and which steps of a trial are observed in detail. Both take the host time, which
they would not take once the configuration is kept."""

from __future__ import annotations

import enum
import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from bagua_client.communication.agreement import Group
from bagua_client.guard import Losses
from bagua_client.layout import Layout
from bagua_client.measuring.clock import StepTime
from bagua_client.measuring.profiler import PROFILED_STEPS
from bagua_client.measuring.rank_measurement import RankMeasurement, Span
from bagua_client.reporter import GatheredTimes, RankTimes
from bagua_client.tunable.memory import Footprint, Lack, fullest
from bagua_client.tunable.tunable import Tunable
from bagua_client.tuning import State

FORMAT = 12
"""The format of reports and of what follows them; a release that changes it has another number. All
ranks must have the same."""
HEADER = 15
LARGEST_REPORT = 32
ROOM_BYTES = 384
"""Room for a packed command: what does not fit comes a step later, and so does the switch."""
ROOM_AT = HEADER + 3 * LARGEST_REPORT


NO_LOSSES = Losses()
NO_TIMES = RankTimes(0, ())
NO_MEMORY = Footprint()


class Stop(enum.IntEnum):
    """Whether a rank asks all to stop the tuning; anything but NO does."""

    NO = 0
    ERROR = 1
    REFUSED = 2
    """The training does something under which nothing can be tuned."""


@dataclass
class Report:
    """One rank's report.

    Attributes:
        command_bytes: length of the command; 0: none. Only rank 0's counts.
        command: empty where it is too long for a report, and follows. Only rank 0's counts.
        next_report: after so many reductions more. Only rank 0's counts.
        stop: whether all must stop, for a reason that this rank logs.
        losses: those that came to be known since the last one.
        memory: that what is in force takes.
        times: of at most LARGEST_REPORT steps.
    """

    command_bytes: int = 0
    command: bytes = b""
    next_report: int = 0
    stop: Stop = Stop.NO
    losses: Losses = NO_LOSSES
    memory: Footprint = NO_MEMORY
    times: RankTimes = NO_TIMES

    def take(self, steps: Sequence[StepTime], in_detail: bool) -> None:
        """Take these steps into the report.

        Args:
            in_detail: somebody wants to know more than how long they took.
        """
        if steps:
            seconds = [step.seconds for step in steps]
            computed = _known(step.compute_seconds for step in steps) if in_detail else ()
            complexities = _known(step.complexity for step in steps) if in_detail else ()
            self.times = RankTimes(steps[0].step, seconds, computed, complexities)


def gathered(reports: Sequence[Report], spans: Iterable[Span]) -> Iterator[GatheredTimes]:
    """Yield what all ranks tell of these steps; nothing where they tell none."""
    _, memory = fullest([report.memory for report in reports])
    taken = memory.to_json() if memory.device_bytes else None
    for span in spans:
        by_rank = [report.times.between(span.first, span.last) for report in reports]
        if any(times.seconds for times in by_rank):
            # What was left takes no memory any more.
            yield GatheredTimes(span.trial, by_rank, taken if span.is_in_force else None)


def _known(values: Iterable[float | None]) -> list[float]:
    """Write NaN for what is not known; nothing where none is."""
    found = [math.nan if value is None else value for value in values]
    return [] if all(map(math.isnan, found)) else found


def ending(stops: Sequence[Stop], refusal: str) -> tuple[State, str]:
    """The state of a tuning that some rank asked to stop, and why; the same on all of them.

    Args:
        stops: by rank.
        refusal: why nothing can be tuned on this rank, if it says so.
    """
    if all(stop is Stop.REFUSED for stop in stops):
        return "off", refusal
    ranks = ", ".join(str(rank) for rank, stop in enumerate(stops) if stop)
    what = "an error on" if Stop.ERROR in stops else "nothing can be tuned on"
    return "failed", f"{what} rank {ranks}; see the log of that rank"


class Message(NamedTuple):
    """A message under way, due after so many reductions; ``read`` waits, and gives the next."""

    due: int
    read: Callable[[], Message | None]


class Exchange:
    """Carries all ranks' reports to all ranks, again and again. All ranks must make theirs
    together.

    Its memory is used anew each time: new tensors were a third of what a report costs.
    """

    def __init__(self, group: Group) -> None:
        self._group, self._is_closed = group, False
        self._own = array("d", bytes(8 * ROOM_AT + ROOM_BYTES))
        # Alone, what this process puts is all that comes.
        self._rows = [self._own]
        if group is not None:
            self._rows = [array("d", self._own) for _ in range(dist.get_world_size(group))]
        self._own_tensor = torch.frombuffer(self._own, dtype=torch.float64)
        self._tensors = [torch.frombuffer(row, dtype=torch.float64) for row in self._rows]
        self._work: dist.Work | None = None

    @property
    def group(self) -> Group:
        """The ranks' control group."""
        if self._is_closed:
            raise RuntimeError("the tuning's control group is gone")
        return self._group

    def close(self) -> None:
        """Let go of the group: whatever keeps this does not keep that."""
        self._group, self._work, self._is_closed = None, None, True

    def put(self, report: Report) -> None:
        """Put this rank's report, to be sent next."""
        first_step, *parts = report.times
        header = (
            report.command_bytes,
            report.next_report,
            report.stop,
            *report.losses,
            *report.memory,
            first_step,
            *map(len, parts),
        )
        values = array("d", (*header, *chain(*parts)))
        self._own[: len(values)] = values
        if 0 < len(report.command) <= ROOM_BYTES:
            self._own[ROOM_AT:] = array("d", report.command.ljust(ROOM_BYTES))

    def send(self, report: Report) -> None:
        """Put this rank's report and send it; see ``start``."""
        self.put(report)
        self.start()

    def start(self) -> None:
        """Send it. All ranks must come to this together, after the last conclusion."""
        if (group := self.group) is not None:
            self._work = dist.all_gather(
                self._tensors, self._own_tensor, group=group, async_op=True
            )

    def start_command(self, size_bytes: int, command: bytes | None) -> Callable[[], bytes]:
        """Send a command that is too long for a report; only rank 0 has it. All ranks must come to
        this together. Returns what waits for it."""
        if (group := self.group) is None:
            return lambda: command or b""
        text = torch.zeros(size_bytes, dtype=torch.uint8)
        if command is not None:
            text = torch.frombuffer(bytearray(command), dtype=torch.uint8)
        source = dist.get_global_rank(group, 0)
        work = dist.broadcast(text, src=source, group=group, async_op=True)

        def arrives() -> bytes:
            work.wait()
            return bytes(text.tolist())

        return arrives

    def conclude(self) -> list[Report]:
        """Wait; the reports by rank."""
        if self._work is not None:
            self._work.wait()
        return [_report(row) for row in self._rows]


def _report(row: array[float]) -> Report:
    command_bytes, next_report, stop = map(int, row[:3])
    losses = Losses(int(row[3]), row[4], row[5], int(row[6]))
    peak, limit, device, lack = map(int, row[7:11])
    memory = Footprint(peak, limit, device, Lack(lack)) if device else NO_MEMORY
    first_step, *lengths = map(int, row[11:HEADER])
    values = iter(row[HEADER : HEADER + sum(lengths)])
    parts = [list(islice(values, length)) for length in lengths]
    command = row[ROOM_AT:].tobytes()[:command_bytes] if command_bytes <= ROOM_BYTES else b""
    times = RankTimes(first_step, *parts)
    return Report(command_bytes, command, next_report, Stop(stop), losses, memory, times)


# How many steps lie between two reports: few enough to act soon, enough to keep them cheap.

SHORTEST_SECONDS = 0.1
"""A report wakes the reporter's thread, which then competes for the interpreter."""
LARGEST_SHARE = 0.004
"""The largest share of the step time for reports on the training thread; 0.5 % may be spent in
all."""
MOST_REDUCTIONS = 16
MOST_FOR_COST = 3
"""Most steps between reports where a report is dear: where the gradients fill the link it waits
behind them, and a trial that goes on unread for longer costs more.
"""
COSTS_REMEMBERED = 5
REPORTS_REMEMBERED = 8
"""Reports over which a step's time is averaged: a training thread that runs ahead of its GPU makes
several steps in no time, then waits for it.
"""
WATCHING_REDUCTIONS = 24
SUSPICIOUS_REDUCTIONS = 4


class Pace:
    """Rank 0's choice of the pace, from what it sees of its own steps and messages."""

    def __init__(self) -> None:
        self._reports = deque([(0, time.monotonic())], maxlen=REPORTS_REMEMBERED)
        # The median: one report that waited long says nothing of the next.
        self._costs_seconds = deque([0.0], maxlen=COSTS_REMEMBERED)

    def took(self, seconds: float) -> None:
        """A report cost the training thread so long."""
        self._costs_seconds.append(seconds)

    def until_next(self, reductions: int, suspects: bool | None = None) -> int:
        """The reductions until the next report; one starts now, after ``reductions`` in all.

        Args:
            suspects: after the tuning, whether step times may be changing; None: while tuning.
        """
        if suspects is None:
            return self._frequent(reductions)
        frequent = max(SUSPICIOUS_REDUCTIONS, self._frequent(reductions))
        return frequent if suspects else WATCHING_REDUCTIONS

    def _frequent(self, reductions: int) -> int:
        (before, then), now = self._reports[0], time.monotonic()
        self._reports.append((reductions, now))
        if reductions == before:
            return 1
        step_seconds = max((now - then) / (reductions - before), 1e-9)
        rare = min(SHORTEST_SECONDS / step_seconds, MOST_REDUCTIONS)
        cheap = median(self._costs_seconds) / LARGEST_SHARE / step_seconds
        return max(1, math.ceil(max(rare, min(cheap, MOST_FOR_COST))))


HOOK_SECONDS = 50e-6
"""What the hook takes for a bucket where the host has little time to spare; where it has, 10 to 20
us. 200 us were seen."""
MOST_SHARE = 0.02
"""Of a step, for the hook; configurations with which it may take more are measured without it."""
MOST_WAITED_STEPS = 100
"""So many steps a job that waits to be tuned has the hook, from which the order of its gradients is
known: others may be tuned first, or the service may never come."""
DROPPED_STEPS = 2
"""Steps after a switch that are not measured: the re-cut itself, and the caches it emptied."""


class Detail:
    """What one model's trials are observed by. All ranks decide the same, in the same step.

    A configuration under which torch can carry the buckets by itself is observed in detail when it
    is tried first: while it is measured, or before that if it has many buckets for its step. Tried
    again, as the winner and the default are in the end, it is measured as it would be kept. All
    others need our hook, and are observed by it.
    """

    def __init__(self, tunable: Tunable, measurement: RankMeasurement) -> None:
        self._tunable = tunable
        self._measurement = measurement
        self._known: set[int] = set()
        self._left = -1
        self._waited = 0
        self._step_seconds = math.inf
        self.is_on = True
        """Whether the steps that are measured are."""

    def begin(self, layout: Layout) -> None:
        """A trial of ``layout`` begins, which is scheduled."""
        is_torchs = self._tunable.is_carried_by_torch(layout)
        is_new = not is_torchs or layout.digest not in self._known
        hook_seconds = len(layout.partition) * HOOK_SECONDS
        comes_before = is_torchs and is_new and hook_seconds > MOST_SHARE * self._step_seconds
        self._known.add(layout.digest)
        self._left = PROFILED_STEPS if comes_before else -1
        self.is_on = is_new and not comes_before
        self._tunable.attach(is_new)  # The end of the round before may not have been settled.

    def wait(self, trial: int | None) -> None:
        """A step of a job that is not tuned yet, or is in a trial, has ended."""
        self._waited = self._waited + 1 if trial is None else 0
        now = self._tunable.layout
        if self._waited == MOST_WAITED_STEPS and self._tunable.is_carried_by_torch(now):
            self._tunable.attach(in_detail=False)

    def forget(self) -> None:
        """The round is over; the next one learns anew."""
        self._known.clear()

    def told(self, reports: Iterable[Report]) -> None:
        """The ranks have told one another the times of some steps."""
        if seconds := [each for report in reports for each in report.times.seconds]:
            self._step_seconds = median(seconds)

    @property
    def dropped_steps(self) -> int:
        """The first steps of the trial that began last, which are not measured."""
        before = self._left + DROPPED_STEPS if self._left > 0 else 0
        return before + DROPPED_STEPS

    def step_ends(self, trial: int | None) -> bool:
        """A step ends after a switch. Returns whether steps are measured from the next one on."""
        if not self._tunable.is_settled:
            return False
        if trial is None or self._left < 0:
            return True
        if self._left == PROFILED_STEPS:
            self._tunable.observers.call(self._measurement.begin_recording, trial)
        elif self._left == 0:
            self._tunable.attach(in_detail=False)
        self._left -= 1
        return False

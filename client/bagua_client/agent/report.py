"""The message of every rank to all others: its new step times, and from rank 0 the command."""

from __future__ import annotations

import enum
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

import torch
import torch.distributed as dist

from bagua_client.communication.agreement import Group
from bagua_client.guard import Losses
from bagua_client.measuring.clock import StepTime
from bagua_client.measuring.rank_measurement import Span
from bagua_client.reporter import GatheredTimes, RankTimes
from bagua_client.tunable.memory import Footprint, Lack, fullest
from bagua_client.tuning import State

FORMAT = 11
"""The format of reports and of what follows them; a release that changes it has another number. All
ranks must have the same."""
HEADER = 15
LARGEST_REPORT = 32
ROOM_BYTES = 384
"""Room for a command; all but those that list buckets are shorter."""
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

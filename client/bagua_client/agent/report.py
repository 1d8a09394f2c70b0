"""What every rank tells the others: its new step times, and from rank 0 what comes next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

HEADER = 5
LARGEST_REPORT = 32


@dataclass
class Report:
    """One rank's.

    Attributes:
        command_bytes: length of the command that follows; 0: none. Only rank 0's counts.
        next_report: after so many reductions. Only rank 0's counts.
        stop: something went wrong on this rank alone; all must stop.
        first_step: the number of the first step in ``seconds``.
        seconds: of that step and those after it, at most LARGEST_REPORT.
    """

    command_bytes: int = 0
    next_report: int = 0
    stop: bool = False
    first_step: int = 0
    seconds: Sequence[float] = ()


class Exchange:
    """All ranks' reports, on their way to all ranks, who must start it together."""

    def __init__(self, report: Report, group: dist.ProcessGroup) -> None:
        row = [0.0] * (HEADER + LARGEST_REPORT)
        row[:HEADER] = (
            report.command_bytes,
            report.next_report,
            report.stop,
            report.first_step,
            len(report.seconds),
        )
        row[HEADER : HEADER + len(report.seconds)] = report.seconds
        own = torch.tensor(row, dtype=torch.float64)
        self._rows = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        self._work = dist.all_gather(self._rows, own, group=group, async_op=True)

    def conclude(self) -> list[Report]:
        """Wait; the reports by rank."""
        if self._work is not None:
            self._work.wait()
        return [_report(row.tolist()) for row in self._rows]


def _report(row: list[float]) -> Report:
    command_bytes, next_report, stop, first_step, steps = map(int, row[:HEADER])
    seconds = row[HEADER : HEADER + steps]
    return Report(command_bytes, next_report, bool(stop), first_step, seconds)

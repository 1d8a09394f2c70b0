"""The training thread's part of the agent: it runs at the end of each step, on every rank.

The ranks talk over a control group of their own, in messages that start at the end of one step
and are read at the end of the next, when they have long arrived. A switch takes four of them:

1. report: every rank's new step times to all; rank 0 says whether a command follows;
2. command: rank 0's, to all;
3. vote: the digest of the buckets that each rank would cut;
4. all agree: every rank re-cuts before its next forward pass; else all return to the baseline.

At the end of a step's communication every rank is known to have come there, so no message is
ever started by some ranks only.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from bagua_client.agent.clock import clock_for
from bagua_client.agent.inbox import Event, Samples
from bagua_client.agent.job import describe_job, name_of
from bagua_client.agent.reporter import Reporter
from bagua_client.configuration import Configuration
from bagua_client.environment import Environment
from bagua_client.reducer.reconfiguration import Reconfiguration
from bagua_client.reducer.reducer import Reducer

logger = logging.getLogger(__name__)

DROPPED_STEPS = 2
"""Steps after a switch that are not measured: the re-cut itself, and the caches it emptied."""
LARGEST_REPORT = 32
REPORT_SECONDS = 0.25
SLOWEST_REPORT_STEPS = 16
HEADER = 4

CPU = torch.device("cpu")

Next = Callable[[], "Next | None"]
"""Reads the message in flight; answers with the one that it led to, if any."""


class Agent:
    """One model's agent on one rank. Collective: all ranks make theirs together."""

    def __init__(self, reducer: Reducer, environment: Environment, name: str) -> None:
        communicator = reducer.communicator
        self._reducer = reducer
        self._environment = environment
        self._name = name
        self._rank = communicator.rank
        self._world_size = communicator.world_size
        self._group = communicator.new_group([range(self._world_size)], backend="gloo")
        # Discovering is collective, and rank 0 alone describes the job later.
        _ = communicator.topology
        self._clock = clock_for(communicator.device)
        self._active = True
        self._reporter: Reporter | None = None
        self._step = 0
        self._valid = False
        self._trial: int | None = None
        self._measured_from = 0
        self._samples: list[tuple[int, float]] = []
        self._switched_in = -1
        self._next_report = 0
        self._last_report_at = (0, time.monotonic())
        self._in_flight: Next | None = None
        reducer.after_reduction = self.step_done

    @property
    def is_active(self) -> bool:
        return self._active

    def interrupted(self) -> None:
        """Something that is no training (an evaluation) happens in this step."""
        self._valid = False

    def step_done(self) -> None:
        """The end of a step's communication; all ranks are in the same step here."""
        try:
            self._advance()
        except Exception as error:
            self._detach()
            logger.error("autotune stopped on rank %d: %s", self._rank, error)

    def _advance(self) -> None:
        self._step += 1
        self._clock.tick(self._step, self._valid)
        self._valid = True
        if self._step - 1 == self._switched_in:
            self._tell("switched", self._trial, "", self._reducer.recut_seconds)
        if self._in_flight is not None:
            self._in_flight = self._in_flight()
        elif self._step >= self._next_report and self._reducer.order_is_agreed:
            self._in_flight = self._start_report()

    def _start_report(self) -> Next:
        """Message 1: one row of float64 per rank, [command bytes, next report's step, first
        step, number of steps, their seconds...]; the first two count on rank 0 only."""
        row = torch.zeros(HEADER + LARGEST_REPORT, dtype=torch.float64)
        command = None
        if self._rank == 0:
            if self._reporter is None:
                description = describe_job(self._reducer, self._environment, self._name)
                self._reporter = Reporter(self._environment, description)
            command = self._reporter.take_command()
            row[0] = len(command or b"")
            row[1] = self._step + self._steps_between_reports()
        new = [sample for sample in self._clock.drain() if sample[0] >= self._measured_from]
        self._samples += new if self._trial is not None else []
        sent, self._samples = self._samples[:LARGEST_REPORT], self._samples[LARGEST_REPORT:]
        if sent:
            row[2], row[3] = sent[0][0], len(sent)
            row[HEADER : HEADER + len(sent)] = torch.tensor([seconds for _, seconds in sent])
        rows = torch.empty(self._world_size, row.numel(), dtype=torch.float64)
        work = dist.all_gather(list(rows.unbind()), row, group=self._group, async_op=True)
        return partial(self._read_report, work, rows, command)

    def _read_report(
        self, work: dist.Work, rows: torch.Tensor, command: bytes | None
    ) -> Next | None:
        work.wait()
        command_bytes, self._next_report = int(rows[0, 0]), int(rows[0, 1])
        if self._reporter is not None and self._trial is not None:
            by_rank = [(int(row[2]), row[HEADER : HEADER + int(row[3])]) for row in rows.tolist()]
            if any(seconds for _, seconds in by_rank):
                self._reporter.put(Samples(self._trial, by_rank))
        return self._start_command(command, command_bytes) if command_bytes else None

    def _start_command(self, command: bytes | None, length: int) -> Next:
        """Message 2: the command's bytes."""
        text = torch.zeros(length, dtype=torch.uint8)
        if command is not None:
            text = torch.frombuffer(bytearray(command), dtype=torch.uint8)
        source = dist.get_global_rank(self._reducer.communicator.group, 0)
        work = dist.broadcast(text, src=source, group=self._group, async_op=True)
        return partial(self._read_command, work, text)

    def _read_command(self, work: dist.Work, text: torch.Tensor) -> Next:
        """Message 3: the vote on it."""
        work.wait()
        trial: int | None = None
        configuration: Configuration | None = None
        try:
            command = json.loads(bytes(text.tolist()))
            trial = command["trial"]
            configuration = Configuration.from_json(command["configuration"])
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("rank %d cannot carry out the service's command: %s", self._rank, error)
        change = Reconfiguration(self._reducer, configuration, self._group, CPU)
        return partial(self._read_vote, change, trial)

    def _read_vote(self, change: Reconfiguration, trial: int | None) -> None:
        layout = change.conclude()
        self._reducer.schedule(layout)
        self._samples.clear()
        self._measured_from = self._step + 1 + DROPPED_STEPS
        self._trial = trial if change.agreed else None
        if not change.agreed:
            self._tell("disagreement", trial, change.reason, None)
        elif trial is not None:
            self._switched_in = self._step
        self._next_report = self._step + 1
        if trial is None:
            self._end()

    def _end(self) -> None:
        """The last command is in force: from the step after the next on nothing is left."""
        self._active = False
        if self._reporter is not None:
            self._reporter.finish()
        self._reducer.after_reduction = self._leave

    def _leave(self) -> None:
        """One step after the last vote, which every rank has read by now."""
        self._detach()
        dist.destroy_process_group(self._group)
        self._reducer.communicator.release(self._reducer.layout.configuration.hierarchical)

    def _detach(self) -> None:
        """From now on a step costs nothing."""
        self._active = False
        self._reducer.after_reduction = None
        self._in_flight = None

    def _tell(self, kind: str, trial: int | None, message: str, seconds: float | None) -> None:
        if self._reporter is not None:
            self._reporter.put(Event(kind, trial, self._step, message, seconds))

    def _steps_between_reports(self) -> int:
        """So many that a report comes about every REPORT_SECONDS, in steps of this job."""
        (step, then), now = self._last_report_at, time.monotonic()
        self._last_report_at = (self._step, now)
        if self._step == step:
            return 1
        step_seconds = (now - then) / (self._step - step)
        return max(1, min(math.ceil(REPORT_SECONDS / step_seconds), SLOWEST_REPORT_STEPS))


_wrapped_models = 0


def start_agent(reducer: Reducer, environment: Environment, model: str) -> Agent:
    """The agent of the next model that this process wraps. All ranks must call it together."""
    global _wrapped_models
    _wrapped_models += 1
    return Agent(reducer, environment, name_of(environment, model, _wrapped_models))

"""The training thread's part of the agent: it runs at the end of each step, on every rank.

The ranks talk over a control group of their own, in messages that start at the end of one step
and are read at the end of the next, when they have long arrived. A switch takes four of them:

1. report: every rank's new step times to all; rank 0 says whether a command follows;
2. command: rank 0's, to all;
3. vote: the digest of the buckets that each rank would cut;
4. all agree: every rank re-cuts before its next forward pass; else all return to the baseline.

At the end of a step's communication every rank is known to have come there, so no message is
ever started by some ranks only. An error of a collective is not caught here: a rank is gone, and
the training's own collectives would say so next.
"""

from __future__ import annotations

import json
import logging
import math
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from bagua_client.agent.boundary import StepBoundary
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
IDLE_SECONDS = 60.0
"""A model that made no step for so long keeps the next one of its process no longer waiting."""

COMMAND_BYTES, NEXT_REPORT, STOP, FIRST_STEP, STEPS = range(5)
HEADER = 5

CPU = torch.device("cpu")

Next = Callable[[], "Next | None"]
"""Reads the message in flight; answers with the one that it led to, if any."""


class Agent:
    """One model's agent on one rank. Collective: all ranks make theirs together.

    Args:
        reducer: of the model.
        parameters: of the model; their optimizers tell the steps.
        environment: the settings.
        name: the job's.
        earlier: agents of models that this process wrapped before; they are tuned first, as
            each would disturb the other's times.
    """

    def __init__(
        self,
        reducer: Reducer,
        parameters: Iterable[torch.nn.Parameter],
        environment: Environment,
        name: str,
        earlier: Sequence[Agent],
    ) -> None:
        communicator = reducer.communicator
        self._reducer = reducer
        self._environment = environment
        self._name = name
        self._earlier = [weakref.ref(agent) for agent in earlier]
        self._rank = communicator.rank
        self._world_size = communicator.world_size
        self._group = communicator.new_group([range(self._world_size)], backend="gloo")
        # Groups are made now, while all ranks are here, and not in the middle of the training.
        communicator.prepare(Configuration(hierarchical="leaders"))
        self._clock = clock_for(communicator.device)
        self._boundary = StepBoundary(parameters)
        self._reporter: Reporter | None = None
        self._active = True
        self._reductions = 0
        self._step = 0
        self._trial: int | None = None
        self._measured_from = 0
        self._samples: list[tuple[int, float]] = []
        self._switched_in = -1
        self._next_report = 0
        self._last_report_at = (0, time.monotonic())
        self._in_flight: Next | None = None
        reducer.after_reduction = self.reduction_done

    @property
    def is_active(self) -> bool:
        return self._active

    @property
    def is_idle(self) -> bool:
        """Whether its model makes no steps at present."""
        return time.monotonic() - self._last_report_at[1] > IDLE_SECONDS

    def reduction_done(self) -> None:
        """The end of a step's communication; all ranks are in the same one here."""
        self._reductions += 1
        if self._boundary.begins():
            self._step += 1
            self._clock.tick(self._step)
        if self._reductions - 1 == self._switched_in:
            self._tell("switched", self._trial, "", self._reducer.recut_seconds)
        if self._in_flight is not None:
            self._in_flight = self._in_flight()
        elif self._reductions >= self._next_report and self._reducer.order_is_agreed:
            self._in_flight = self._start_report()

    def close(self) -> None:
        """The model's wrapper is gone on this rank. Not collective."""
        self._detach()
        if self._reporter is not None:
            self._reporter.close()

    def _start_report(self) -> Next:
        """Message 1: one row of float64 per rank, [command bytes, next report, stop, first
        step, number of steps, their seconds...]; the first two count on rank 0 only.

        Whatever goes wrong on this rank alone, it takes part: a rank that stayed away would
        leave the others waiting. It asks all to stop instead.
        """
        command = None
        report = [0.0] * (HEADER + LARGEST_REPORT)
        try:
            if self._rank == 0:
                command = self._next_command()
                report[COMMAND_BYTES] = len(command or b"")
                report[NEXT_REPORT] = self._reductions + self._reductions_between_reports()
            self._write_samples(report)
        except Exception:
            logger.exception("autotune stops: an error on rank %d", self._rank)
            report[STOP] = 1
        row = torch.tensor(report, dtype=torch.float64)
        rows = [torch.empty_like(row) for _ in range(self._world_size)]
        work = dist.all_gather(rows, row, group=self._group, async_op=True)
        return partial(self._read_report, work, rows, command)

    def _next_command(self) -> bytes | None:
        if self._reporter is None and not self._must_wait():
            description = describe_job(self._reducer, self._environment, self._name)
            self._reporter = Reporter(self._environment, description)
        return None if self._reporter is None else self._reporter.take_command()

    def _must_wait(self) -> bool:
        earlier = [agent for reference in self._earlier if (agent := reference()) is not None]
        return any(agent.is_active and not agent.is_idle for agent in earlier)

    def _write_samples(self, report: list[float]) -> None:
        new = [sample for sample in self._clock.drain() if sample[0] >= self._measured_from]
        self._samples += new if self._trial is not None else []
        sent, self._samples = self._samples[:LARGEST_REPORT], self._samples[LARGEST_REPORT:]
        if sent:
            report[FIRST_STEP], report[STEPS] = sent[0][0], len(sent)
            report[HEADER : HEADER + len(sent)] = [seconds for _, seconds in sent]

    def _read_report(
        self, work: dist.Work, rows: list[torch.Tensor], command: bytes | None
    ) -> Next | None:
        work.wait()
        reports = [row.tolist() for row in rows]
        if any(report[STOP] for report in reports):
            self._reducer.schedule(self._reducer.plan(self._reducer.default))
            self._tell("ended", None, "an error on a rank ended the tuning", None)
            self._end(self._reducer.default)
            return None
        command_bytes = int(reports[0][COMMAND_BYTES])
        self._next_report = int(reports[0][NEXT_REPORT])
        following = self._start_command(command, command_bytes) if command_bytes else None
        # Last: from here on the reporter's thread competes for the interpreter.
        if self._reporter is not None and self._trial is not None:
            by_rank = [
                (int(report[FIRST_STEP]), report[HEADER : HEADER + int(report[STEPS])])
                for report in reports
            ]
            if any(seconds for _, seconds in by_rank):
                self._reporter.put(Samples(self._trial, by_rank))
        return following

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
        except Exception as error:
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
            self._switched_in = self._reductions
        self._next_report = self._reductions + 1
        if trial is None:
            self._end(layout.configuration)

    def _end(self, configuration: Configuration) -> None:
        """This is the configuration to keep."""
        self._active = False
        if self._reporter is not None:
            self._reporter.finish()
        self._reducer.after_reduction = partial(self._leave, configuration)

    def _leave(self, configuration: Configuration) -> None:
        """One step after the last message, which every rank has read by now: let go of all."""
        if self._reducer.layout.configuration != configuration:
            return  # No forward pass yet; the old buckets' groups are still in use.
        self._detach()
        dist.destroy_process_group(self._group)
        self._reducer.communicator.release(configuration)

    def _detach(self) -> None:
        """From now on a step costs nothing."""
        self._active = False
        self._boundary.close()
        self._reducer.after_reduction = None
        self._in_flight = None

    def _tell(self, kind: str, trial: int | None, message: str, seconds: float | None) -> None:
        if self._reporter is not None:
            self._reporter.put(Event(kind, trial, self._step, message, seconds))

    def _reductions_between_reports(self) -> int:
        """So many that a report comes about every REPORT_SECONDS."""
        (reductions, then), now = self._last_report_at, time.monotonic()
        self._last_report_at = (self._reductions, now)
        if self._reductions == reductions:
            return 1
        seconds = (now - then) / (self._reductions - reductions)
        return max(1, min(math.ceil(REPORT_SECONDS / seconds), SLOWEST_REPORT_STEPS))


_agents: list[weakref.ref[Agent]] = []
"""Of the models that this process wrapped, in that order."""


def start_agent(
    reducer: Reducer,
    parameters: Iterable[torch.nn.Parameter],
    environment: Environment,
    model: str,
) -> Agent:
    """The agent of the next model that this process wraps. All ranks must call it together."""
    name = name_of(environment, model, len(_agents) + 1)
    earlier = [agent for reference in _agents if (agent := reference()) is not None]
    agent = Agent(reducer, parameters, environment, name, earlier)
    _agents.append(weakref.ref(agent))
    return agent

"""The agent runs on the training thread of every rank, at the end of each step.

The ranks talk over a control group of their own, in messages that start at the end of one step
and are read at the end of the next, by when they have arrived. A switch takes two of them:

1. report: every rank's new step times to all, and rank 0's command; a command that does not fit
   follows in a message of its own;
2. vote: the digest of the buckets that each rank would cut.

If all agree, every rank re-cuts before its next forward pass; else all return to the default. One
more report, from one trial to the next, tells the last steps before the switch.

After the tuning reports become rare; from them rank 0 sees whether step times change for good, and
a command may then begin another round; and all ranks see whether the loss turns back under what was
kept, if that changes the numbers (see second_look), and return to the default. After an error in a
tuning nothing is watched, and the agent ends; after one of the reporter's the loss still is.

Under an algorithm in which no rank waits for another, a report is read some steps later, so that it
holds no rank up; a switch comes after as many steps on all. Afterwards such a job is not watched.

Every rank reaches the end of a step's communication, so no message is ever started by only some
ranks. An error of a collective is not caught here: the training's next collective would fail too.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from bagua_client.agent.job import Command, Correspondence
from bagua_client.agent.outcome import Outcome, awaited
from bagua_client.agent.report import (
    LARGEST_REPORT,
    Detail,
    Exchange,
    Message,
    Pace,
    Report,
    Stop,
    ending,
)
from bagua_client.communication.agreement import Group, destroy
from bagua_client.environment import Environment
from bagua_client.guard import LossGuard
from bagua_client.layout import Layout
from bagua_client.measuring.rank_measurement import Measures, RankMeasurement
from bagua_client.tunable.memory import fullest, why_given_up
from bagua_client.tunable.reconfiguration import Reconfiguration, way_back
from bagua_client.tunable.tunable import Tunable

logger = logging.getLogger(__name__)

FIRST_REPORT_STEPS = 1
"""Measured steps of a trial after which the first report is made: mostly that is enough."""
STEPS_APART = 16
"""A report is read so many steps later where an algorithm has no rank wait for another."""
CPU = torch.device("cpu")


class State(enum.Enum):
    """The state of an agent, one after the other; the same on all ranks in the same step.

    Attributes:
        TUNING: configurations are tried.
        SETTLING: the last command was given, and its configuration is not in force yet.
        WATCHING: for step times, or the loss, that change; a command leads back to tuning.
        OFF: for good.
    """

    TUNING = enum.auto()
    SETTLING = enum.auto()
    WATCHING = enum.auto()
    OFF = enum.auto()


class Agent(Measures):
    """One model's agent on one rank, which the model reports to. Collective: all ranks make theirs
    together.

    Args:
        tunable: of the model.
        group: the ranks' control group.
        measurement: of this rank's steps.
        service: what there is to do with it.
        environment: the settings.

    Attributes:
        state: changes on all ranks in the same step.
        outcome: what whoever trains may know.
    """

    def __init__(
        self,
        tunable: Tunable,
        group: Group,
        measurement: RankMeasurement,
        service: Correspondence,
        environment: Environment,
    ) -> None:
        self._tunable, self.measurement = tunable, measurement
        self._service = service
        self._rank = tunable.communicator.rank
        self._observers, self._observe = tunable.observers, tunable.observers.call
        self._exchange = Exchange(group)
        self._detail = Detail(tunable, measurement)
        self._pace = Pace()
        self.outcome = Outcome(
            *(service.job, tunable, environment.result, measurement.count),
            page=service.page,
            awaits=lambda: awaited(tunable, self._reductions, service.must_wait, environment),
        )
        self.state = State.TUNING
        self._will_watch = self._is_switching = False
        self._reductions = self._next_report = 0
        self._trial: int | None = None
        self._refusal = ""
        self._guard = LossGuard()
        self._put_in_force = tunable.layout.configuration
        self._in_flight: Message | None = None
        tunable.vote_in(group, CPU)
        if tunable.memory is not None:
            tunable.memory.share = environment.memory_share
        tunable.attach()
        tunable.report_to(self)
        tunable.see_inputs(True)
        measurement.follow()
        self.outcome.begin()

    @property
    def is_active(self) -> bool:
        """Whether configurations are being tried; changes on all ranks in the same step."""
        return self.state is State.TUNING

    def reduced(self) -> None:
        """See :meth:`Listener.reduced`."""
        if self.state is State.SETTLING and not self._settle():
            return
        self._reductions += 1
        begins = bool(self._observe(self.measurement.tick))
        if self._is_switching and self._detail.step_ends(self._trial):
            self._switched()
        if self.is_active:
            self._detail.wait(self._trial)
            self._observe(self.measurement.record, begins)
        if self._in_flight is not None:
            if self._reductions >= self._in_flight.due:
                self._in_flight = self._in_flight.read()
        elif self._reductions >= self._next_report and self._tunable.order_is_agreed:
            self._in_flight = self._start_report()

    def report_loss(self, loss: torch.Tensor | float) -> None:
        """Take the loss of this rank's batch in this step."""
        if self.state is not State.OFF:
            self._observers.tell(self._guard.tell, loss)

    def abandon(self) -> None:
        """Another rank could not make its own: nothing of this one has been used."""
        self.outcome.forget()
        self.close()

    def close(self, reason: str = "") -> None:
        """The model's wrapper is gone on this rank, or the group of its ranks. Not collective.

        Args:
            reason: why the tuning ends although the training may go on; empty: it is over.
        """
        if reason:
            self.outcome.end("off", reason, self.measurement.step)
            self._service.finish(reason)
        self._detach()
        self.outcome.close()
        self._service.close()

    def _start_report(self) -> Message:
        """Message 1: every rank's report to all.

        Whatever goes wrong on this rank alone, it takes part: a rank that stayed away would
        leave the others waiting. It asks all to stop instead.
        """
        began = time.perf_counter()
        command = self._observe(self._put_report)
        if self._observers.has_failed:
            self._exchange.put(Report(stop=Stop.ERROR))
        self._exchange.start()
        took = time.perf_counter() - began
        return self._due(partial(self._read, command, took, self._reductions))

    def _put_report(self) -> bytes | None:
        report, command = Report(), None
        self._refusal = self._tunable.refusal or self._service.nothing_to_try()
        if self._refusal:
            report.stop = Stop.REFUSED
        elif self._rank == 0:
            may_leave = self._trial is None or self.measurement.may_be_left
            command = self._service.next_command(
                self._reductions, self._watches, may_leave, self._guard.has_any
            )
            report.command = command or b""
            report.command_bytes = len(report.command)
            suspects = None if self.is_active else self._service.suspects()
            report.next_report = self._pace.until_next(self._reductions, suspects)
        wanted = self._trial is not None or self._watches
        report.take(self.measurement.take(wanted, LARGEST_REPORT), self.is_active)
        report.losses = self._guard.take()
        if self._tunable.memory is not None and not self._is_switching:
            report.memory = self._tunable.memory.read()
        self._exchange.put(report)
        return command

    def _read(self, command: bytes | None, start_seconds: float, reductions: int) -> Message | None:
        """Read the report that began after so many reductions."""
        began = time.perf_counter()
        reports = self._exchange.conclude()
        if any(report.stop for report in reports):
            self._stop([report.stop for report in reports])
            return None
        self._next_report = reductions + reports[0].next_report
        self._detail.told(reports)
        found, losses = self._tunable.layout.configuration, [report.losses for report in reports]
        # Of what the user has set by hand since, the user is the judge.
        if found == self._put_in_force and (harm := self._observe(self._guard.judge, losses)):
            self._undo("diverged", harm)
            return None
        memory = [report.memory for report in reports]
        is_default = found == self._tunable.default
        lack = "" if is_default else why_given_up(memory, is_trial=self._trial is not None)
        if lack:
            self._undo("infeasible", lack, fullest(memory)[1].to_json())
            return None
        following = self._follow_command(reports[0], command)
        self._observe(self._pace.took, start_seconds + time.perf_counter() - began)
        # Last: from here on the reporter's thread competes for the interpreter.
        self._observe(self._service.tell_times, reports)
        return following

    def _start_late_report(self) -> Message:
        """The last steps of a trial that the ranks leave, and nothing else: they switch now."""
        report = Report()
        self._observe(lambda: report.take(self.measurement.take(True, LARGEST_REPORT), True))
        self._exchange.send(report)
        return self._due(lambda: self._observe(self._service.tell_times, self._exchange.conclude()))

    def _due(self, read: Callable[[], Message | None]) -> Message:
        """A report under way, read when no rank has to wait for it."""
        steps = STEPS_APART if self._tunable.algorithm.is_apart else 1
        return Message(self._reductions + steps, read)

    def _follow_command(self, report: Report, command: bytes | None) -> Message | None:
        """The vote on rank 0's command, if there is one; before that the command itself, if it was
        too long for the report."""
        if report.command or not report.command_bytes:
            return self._start_vote(report.command) if report.command else None
        arrives = self._exchange.start_command(report.command_bytes, command)
        return Message(self._reductions + 1, lambda: self._start_vote(arrives()))

    def _start_vote(self, text: bytes) -> Message:
        """Message 2, on a command."""
        command = self._service.read(text)
        change = Reconfiguration(self._tunable, command.configuration, self._exchange.group, CPU)
        return Message(self._reductions + 1, partial(self._read_vote, change, command))

    def _read_vote(self, change: Reconfiguration, command: Command) -> Message | None:
        trial, waits, watch, told, _ = command
        layout, late = change.conclude(), None
        if change.agreed and trial is not None and self._trial is not None:
            late = self._start_late_report()
        self._switch(layout, forgets=late is None)
        self._trial = trial if change.agreed else None
        self._next_report = self._reductions + 1
        if change.agreed:
            self._observe(self.outcome.follow, told, self.measurement.step)
        else:
            misfit = change.misfit
            kind = "disagreement" if misfit is None else "infeasible"
            memory = misfit and misfit.to_json(is_predicted=True)
            self._service.tell(kind, trial, change.reason, memory=memory)
            if not watch:
                self._observe(self.outcome.end, "failed", change.reason, self.measurement.step)
        if trial is None and not waits:
            # The guard needs no service.
            kept = self._tunable.layout_to_come.configuration
            self._end(watch or kept.numbers != self._tunable.default.numbers)
            return None
        self.state = State.TUNING
        self._tunable.see_inputs(True)
        self._detail.begin(layout)
        self.measurement.follow()
        if change.agreed:
            self._next_report = self._reductions + self._detail.dropped_steps + FIRST_REPORT_STEPS
        return late

    def _switch(self, layout: Layout, forgets: bool = True) -> None:
        self._tunable.schedule(layout)
        self._observe(self.measurement.leave, forgets)
        self._observe(self._guard.pause)
        self._is_switching = True

    def _switched(self) -> None:
        """Note that what was commanded is in force, and will stay as it is."""
        self._is_switching = False
        self._observe(self.measurement.begin, self._trial, self._detail.is_on)
        self._put_in_force = found = self._tunable.layout.configuration
        changed = found.numbers if found.numbers != self._tunable.default.numbers else None
        self._observe(self._guard.begin, changed, self._trial is None)
        if self._trial is not None:
            self._service.tell("switched", self._trial, seconds=self._tunable.recut_seconds)

    def went_back(self, reason: str) -> None:
        """See :meth:`Listener.went_back`."""
        self._service.tell("disagreement", self._trial, reason)
        self._trial = None

    def left(self) -> None:
        """See :meth:`Listener.left`."""
        self.close()

    def _undo(self, kind: str, why: str, memory: Mapping[str, Any] | None = None) -> None:
        """Go back to the default: what is in force harms the training, or does not fit in its
        memory, as all ranks know."""
        if self._rank == 0:
            found = self._tunable.layout.configuration
            logger.warning("autotune stops using %s: %s; back to the default", found, why)
        self._switch(way_back(self._tunable, self._exchange.group, CPU))
        self._service.tell(kind, self._trial, why, memory=memory)
        self._trial = None

    def _stop(self, stops: Sequence[Stop]) -> None:
        """Stop on all ranks: some rank cannot go on."""
        if self.is_active or self._tunable.layout.configuration.changes_numbers:
            self._tunable.schedule(way_back(self._tunable, self._exchange.group, CPU))
        state, reason = ending(stops, self._refusal)
        if stops[self._rank] is Stop.REFUSED and (self._rank == 0 or state != "off"):
            logger.warning("autotune is off: %s", self._refusal)
        self._service.tell("ended", None, reason)
        self._observe(self.outcome.end, state, reason, self.measurement.step)
        self._end(watch=False)

    def _end(self, watch: bool) -> None:
        """The configuration that is scheduled is the one to keep."""
        self.state, self._will_watch = State.SETTLING, watch
        self._tunable.see_inputs(False)
        self._service.pass_turn_on()
        self._observe(self.measurement.stop_recording)
        self._detail.forget()
        if not watch:
            self._service.finish()

    def _settle(self) -> bool:
        """The steps after: let go of what is not needed, which all ranks do in the same one.
        Returns whether these are watched."""
        # Before the next forward pass the old buckets' groups are still in use. What is in force
        # after it may be another configuration, if the user set one in between.
        if not self._tunable.is_recut_due:
            if self._tunable.algorithm.is_apart:
                if not self._tunable.is_settled:
                    return False  # The ranks have yet to vote.
                self._will_watch = False  # Reports would hold the fast ones back.
                self._service.finish(
                    "tuned; under its algorithm step times are not watched any more"
                )
            self._tunable.communicator.release(self._tunable.layout.configuration)
            if not self._will_watch:
                group = self._exchange.group
                self._detach()
                destroy(group)
                return False
            self.state = State.WATCHING
            self._tunable.watch()
        return self._will_watch

    @property
    def _watches(self) -> bool:
        """Whether the steps are those after a tuning, and of interest."""
        return self.state is not State.TUNING and self._will_watch

    def _detach(self) -> None:
        """Detach from the model: from now on a step costs nothing."""
        if self.state is State.OFF:
            return  # The model goes after its tuning was given up.
        self.state, self._will_watch = State.OFF, False
        self._service.leave()
        self._observe(self.measurement.close)
        self._tunable.detach()
        self._in_flight = None
        self._exchange.close()

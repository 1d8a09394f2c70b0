"""What a model's ranks have to do with the service, by way of rank 0's reporter: they describe the
job when its turn has come, take commands, and tell what there is to tell of each trial."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bagua_client.agent.job import (
    describe_job,
    is_warming_up,
    nothing_to_try,
    tell_left_alone,
    without_unwatched,
)
from bagua_client.agent.report import Report, gathered
from bagua_client.agent.turns import Turn
from bagua_client.configuration import Configuration
from bagua_client.configuration_file import ConfigurationFile
from bagua_client.environment import Environment
from bagua_client.measuring.rank_measurement import RankMeasurement
from bagua_client.reporter import Event, Handover, Reporter
from bagua_client.tunable.tunable import Tunable

logger = logging.getLogger(__name__)


class Command(NamedTuple):
    """What the service wants the ranks to do; see
    :class:`bagua_client.reporter.conversation.Conversation`.

    Attributes:
        waits: there is no trial now, and the tuning has not ended.
        configuration: None: this rank could not read it, or cannot carry it out.
    """

    trial: int | None = None
    waits: bool = False
    watch: bool = False
    told: Mapping[str, Any] = {}
    configuration: Configuration | None = None


class Correspondence:
    """One model's, on one rank. Only rank 0 has a reporter, once the job is described; without one
    nothing is told. Nothing of it waits for the service.

    Args:
        tunable: of the model.
        measurement: of this rank's steps.
        environment: the settings.
        job: its name.
        handover: of what is known to the other nodes.
        turn: of this model to be tuned; the job's models are tuned one after the other.
        file: what is tried first, after the default.
    """

    def __init__(
        self,
        tunable: Tunable,
        measurement: RankMeasurement,
        environment: Environment,
        job: str,
        handover: Handover,
        turn: Turn,
        file: ConfigurationFile | None = None,
    ) -> None:
        self._tunable, self._measurement = tunable, measurement
        self._observe = tunable.observers.call
        self._environment = environment
        self.job, self._file = job, file
        self._handover = handover
        self._turn = turn
        self._told = tunable.offer.recomputed.left_alone
        self._reporter: Reporter | None = None
        self._disturbed = False

    def nothing_to_try(self) -> str:
        """Why there is nothing to describe a job for; empty: there is, or it is described."""
        if self._reporter is not None:
            return ""
        return nothing_to_try(self._tunable, self._environment.allowed)

    # What the service wants

    def next_command(
        self, reductions: int, is_watching: bool, may_leave: bool, knows_losses: bool
    ) -> bytes | None:
        """Return the command that the ranks were not told yet; rank 0 asks before each report.

        Args:
            reductions: how many there have been.
            is_watching: the tuning is over, and another round begins only by a command.
            may_leave: else what is in force goes on, and the command waits.
            knows_losses: whether the training tells them.
        """
        if is_watching and (self._reporter is None or not self._reporter.has_command):
            return None
        if not self._turn.take(reductions):
            return None
        if self._reporter is None:
            environment = without_unwatched(self._environment, knows_losses)
            if is_warming_up(self._tunable, environment):
                return None
            description = describe_job(self._tunable, environment, self.job, self._file)
            if (why := self._tunable.offer.recomputed.left_alone) != self._told:
                tell_left_alone(self._tunable, [why])  # The first steps have shown it.
            count = self._measurement.count
            self._reporter = Reporter(environment, description, self._handover, count)
        self._reporter.look(reductions)
        return self._reporter.take_command() if may_leave else None

    def read(self, text: bytes) -> Command:
        """Read a command, on any rank, as far as that can be done; it does not raise: other ranks
        vote on it."""
        communicator, found = self._tunable.communicator, Command()
        try:
            said = json.loads(text)
            found = found._replace(trial=said["trial"], watch=said["watch"])
            found = found._replace(waits=said.get("waits", False))
            self._handover.keep(said.get("copy"))
            asked = Configuration.from_json(said["configuration"])
            found = found._replace(told=said["told"])
            communicator.check(asked)
            found = found._replace(configuration=asked)
        except Exception as error:
            rank = communicator.rank
            logger.warning("rank %d cannot carry out the service's command: %s", rank, error)
        return found

    def suspects(self) -> bool | None:
        """Whether step times may be changing, after the tuning; None: nobody watches them."""
        return None if self._reporter is None else self._reporter.is_suspicious

    @property
    def must_wait(self) -> bool | None:
        """Whether another model of this job is tuned first; None: this rank does not know."""
        return None if self._tunable.communicator.rank else self._turn.is_anothers

    def page(self) -> str:
        """The address of the job's page; empty before it is known, and on other ranks."""
        return "" if self._reporter is None else self._reporter.page()

    # What it is told

    def tell(self, kind: str, trial: int | None, message: str = "", **more: Any) -> None:
        """Tell an event of a trial, or of the tuning."""
        if self._reporter is not None:
            event = Event(kind, trial, self._measurement.step, message, **more)
            self._observe(self._reporter.put, event)

    def tell_times(self, reports: Sequence[Report]) -> None:
        """Tell what the ranks have measured of the trial, and of the one before."""
        if self._reporter is None:
            return
        # These steps may go back to the report before, when another model was still being tuned.
        before, self._disturbed = self._disturbed, self._turn.is_anothers
        if not (before or self._disturbed):
            for told in gathered(reports, self._measurement.spans):
                self._reporter.put(told)
        for recording in self._measurement.take_recordings():
            self._reporter.put(recording)

    # How it ends

    def pass_turn_on(self) -> None:
        """The model is tuned: the next one may be."""
        self._observe(self._turn.leave)

    def finish(self, reason: str = "") -> None:
        """No other round follows; see :meth:`Reporter.finish`."""
        if self._reporter is not None:
            self._reporter.finish(reason)

    def leave(self) -> None:
        """The model will never be tuned again."""
        self._observe(self._turn.close)

    def close(self) -> None:
        """The training is over on this rank."""
        if self._reporter is not None:
            self._reporter.close()

"""The conversation with the service, which only the reporter's thread has.

Training goes on whatever the service does: this thread waits until it answers, and drops step times
that it does not take. The ranks keep their configuration meanwhile; but a trial, which may be slow,
they leave after a few seconds for the best that is confirmed. After the tuning the thread watches
the step times, and tells the service only that the training is alive, until they change.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from statistics import median
from typing import Any

from bagua_client.announcement import TrialLines, announce, before_that
from bagua_client.environment import Environment
from bagua_client.measuring.profiler import Recording
from bagua_client.reporter.copies import Handover, is_of
from bagua_client.reporter.inbox import Event, GatheredTimes, Inbox, Message
from bagua_client.reporter.lasting_change import DriftWatch
from bagua_client.service.breaker import SILENT_SECONDS, Absence, Connection, Stopped
from bagua_client.service.client import JobState, Progress, ServiceRefused, StepTimes
from bagua_client.service.sidecar import SidecarError
from bagua_wire.messages import DISAGREED, GIVING_UP, RENEWAL_SECONDS, VOIDING

# Puts the ranks' step times together: a step is told once it has those of all ranks.

MOST_WAITING_VALUES = 2**18
FEWEST_WAITING_STEPS = 64


class StepTable:
    """Collects the ranks' times; a step is complete when it has those of all ranks."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._rows: dict[int, dict[int, tuple[float, ...]]] = {}

    def add(self, gathered: GatheredTimes) -> list[StepTimes]:
        """Add times; return the steps that are complete now.

        Each rank tells its steps in order, so what is older than a complete step will never be
        complete (a message was dropped) and is forgotten. So are the oldest steps that wait too
        long for a rank that tells nothing.
        """
        for rank, times in enumerate(gathered.by_rank):
            first_step, *parts = times
            for step, told in enumerate(zip_longest(*parts, fillvalue=math.nan), first_step):
                self._rows.setdefault(step, {})[rank] = told
        complete = sorted(step for step, row in self._rows.items() if len(row) == self._world_size)
        found = [self._step(step) for step in complete]
        if complete:
            self._rows = {step: row for step, row in self._rows.items() if step > complete[-1]}
        most = max(FEWEST_WAITING_STEPS, MOST_WAITING_VALUES // self._world_size)
        for step in sorted(self._rows)[:-most]:
            del self._rows[step]
        return found

    def _step(self, step: int) -> StepTimes:
        row = self._rows[step]
        ranks = (row[rank] for rank in range(self._world_size))
        seconds, compute, complexities = zip(*ranks, strict=True)
        # Ranks that wait for one another all wait for the largest batch.
        complexity = max(map(abs, complexities)) if _are_alike(complexities) else None
        computed = list(compute) if _are_known(compute) else None
        return StepTimes(step, list(seconds), computed, complexity)


def _are_alike(complexities: Sequence[float]) -> bool:
    """Whether they are known, and of one unit: negative ones are of the models' inputs."""
    signs = {math.copysign(1.0, each) for each in complexities}
    return len(signs) == 1 and _are_known(complexities)


def _are_known(values: Iterable[float]) -> bool:
    return not any(map(math.isnan, values))


# When to tell the service that the training is alive, beside all other reports.

STANDSTILL_SECONDS = 1800.0
"""Time after which ranks that hang have been ended: it is torch's longest usual timeout of a
collective. An evaluation may be as long.
"""
PROGRESS_SECONDS = 600.0
"""Seconds between two progresses of a tuned job: each makes the service sum the job up anew."""
STEPS_REMEMBERED = 1000


class Renewal:
    """Due every 45 seconds, whatever changes; not if the training stands still for too long.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stepped_at = self._renewed_at = self._told_at = clock()
        self._untold: deque[StepTimes] = deque(maxlen=STEPS_REMEMBERED)

    def stepped(self) -> None:
        """The training told something."""
        self._stepped_at = self._clock()

    def watched(self, steps: Iterable[StepTimes]) -> None:
        """The tuned job made these steps."""
        self._untold.extend(steps)

    def take_due(self) -> bool:
        """Whether it is time; then the next is due 45 seconds later."""
        now = self._clock()
        if now - self._renewed_at < RENEWAL_SECONDS:
            return False
        self._renewed_at = now
        return now - self._stepped_at < STANDSTILL_SECONDS

    def take_progress(self, at_once: bool = False) -> Progress | None:
        """Return how far the tuned job is, if that is new.

        Args:
            at_once: also if it was told less than ten minutes ago.
        """
        now = self._clock()
        if not self._untold or (now - self._told_at < PROGRESS_SECONDS and not at_once):
            return None
        self._told_at = now
        seconds = median(max(step.seconds) for step in self._untold)
        progress = Progress(self._untold[-1].step, seconds)
        self._untold.clear()
        return progress


logger = logging.getLogger(__name__)

FIRST_POLL_SECONDS = 0.02
LAST_POLL_SECONDS = 0.2
POLLS_APART = 1.5
"""How many times as long it waits for the next poll as for the one before."""
MOST_REFUSALS = 10
"""Refused requests in a row after which the service and this client do not understand each other.
"""
MOST_VALUES = 10_000
"""Step times of ranks in one request; more wait for the next."""
MOST_DISAGREEMENTS = 5
"""Disagreements in one job after which something is wrong with its ranks, or with what they are
asked.
"""


class Conversation:
    """Registers the job, reports its steps, and gives the command that the ranks run next.

    A command is JSON: ``{"trial": int or null, "configuration": {...}, "watch": bool, "told":
    {...}}``. One without a trial ends the tuning with the configuration to keep, and ``watch`` says
    whether step times are wanted after it; or, where it has ``"waits": true``, it is what to run
    until the next trial. ``told`` is what all ranks shall know: fields of
    :class:`bagua_client.tuning.Tuning`, or nothing. With it goes, at times, a ``copy`` for the
    other nodes (see handover).

    Args:
        environment: the settings.
        description: what the job is registered with.
        inbox: what there is to tell.
        stopping: set when the job ends.
        command: takes the command, in the place of one that the ranks have not been told yet, and
            whether it holds whatever else the ranks have to tell.
        handover: takes copies for the other nodes; None: there is nothing to hand over.
        clock: seconds, in which the service's silence is counted.
    """

    def __init__(
        self,
        environment: Environment,
        description: Mapping[str, Any],
        inbox: Inbox,
        stopping: threading.Event,
        command: Callable[[bytes, bool], None],
        handover: Handover | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._description = description
        self._inbox = inbox
        self._stopping = stopping
        self._put_command = command
        self._handover = handover
        self._steps = StepTable(int(description["world_size"]))
        self._watch = DriftWatch()
        self._renewal = Renewal()
        patience_seconds = min(SILENT_SECONDS, environment.server_wait_seconds)
        self.absence = Absence(patience_seconds, self._leave_trial, clock)
        self._connection = Connection(
            environment,
            uuid.uuid4().hex,
            description,
            stopping,
            self._forget_commands,
            self.absence,
        )
        self._is_registered = False
        self._before = ""  # the result of the round before, in words
        self._commanded: object = object()
        self._is_trying = False
        self._kept: Mapping[str, Any] = description["default_configuration"]
        self._poll_seconds: float | None = None
        self._profile_refusals = 0
        self._trials = TrialLines(logger)
        self._refusals = 0
        self._disagreements = 0

    @property
    def page(self) -> str:
        """The job's, for a browser; empty before it is registered."""
        return self._connection.page if self._is_registered else ""

    @property
    def is_tuning(self) -> bool:
        """Whether there is more to try."""
        return self._commanded is not None

    @property
    def is_suspicious(self) -> bool:
        """Whether step times may be changing, after the tuning."""
        return self._watch.suspects

    @property
    def remains(self) -> str:
        """Say what a training that ends now leaves of its tuning."""
        kept = "its trials are kept" if self._is_registered else self._connection.untold
        return kept + self._before

    def cut(self) -> None:
        """End the request under way, from another thread."""
        self._connection.cut()

    def run(self) -> None:
        """Talk until the job ends, or the tuning does."""
        try:
            copy = self._handover.take() if self._handover is not None else None
            if copy is not None and is_of(copy, self._description):
                self._connection.bring(copy)
            state = self._connection.register()
            self._is_registered = True
            if not self._stopping.is_set():
                self._connection.announce_page()
            self._follow(state)
            while not self._stopping.is_set():
                message = self._inbox.take(timeout_seconds=self._poll_seconds or 1.0)
                if message is not None:
                    self._renewal.stepped()
                    self._deliver(message)
                elif self._poll_seconds is not None:
                    self._follow(self._connection.call(lambda service: service.state()))
                if self._renewal.take_due():
                    self._connection.renew(self._renewal.take_progress())
            while (message := self._inbox.take(timeout_seconds=0.0)) is not None:
                if isinstance(message, Event):
                    self._deliver(message)
        except Stopped:
            return
        except (ServiceRefused, SidecarError, _Hopeless) as error:
            self._give_up(str(error))
        except Exception as error:
            logger.exception("autotune: an error in the thread that talks to the service")
            self._give_up(repr(error))
        finally:
            self._connection.close()

    def _give_up(self, reason: str) -> None:
        """End the tuning of this job. The ranks stay at what the last tuning found; in the
        middle of one they go back to the configuration that the job would have had."""
        if self._stopping.is_set():
            return
        logger.warning("autotune is off for this job: %s", reason)
        failed = {"state": "failed", "reason": reason} if self.is_tuning else {}
        if self.is_tuning or self._inbox.has_event(GIVING_UP):
            self._kept = self._description["default_configuration"]
        self._order(None, self._kept, failed, watch=False)

    def _deliver(self, message: Message) -> None:
        try:
            state = self._send(message)
            if state is None:
                return
            self._refusals = 0
            self._tell_dropped()
        except ServiceRefused as error:
            self._refusals += 1
            if self._refusals == 1:
                logger.warning("autotune: the service refused a report (%s)", error)
            if self._refusals >= MOST_REFUSALS:
                raise
            state = self._connection.call(lambda service: service.state())
        self._follow(state)

    def _tell_dropped(self) -> None:
        if self._inbox.is_empty and (dropped := self._inbox.take_dropped()):
            logger.info(
                "autotune: %d reports were dropped while the service did not answer; the tuning "
                "measures again what it needs",
                dropped,
            )

    def _send(self, message: Message) -> JobState | None:
        """Send the service what there is to say, if anything."""
        if isinstance(message, Event):
            return self._send_event(message)
        if isinstance(message, Recording):
            return self._send_profile(message)
        complete, memory = self._steps.add(message), message.memory
        if message.trial is None:
            # From a trial that was left while the service was away nothing is to be learned.
            return None if self.is_tuning else self._look_for_drift(complete)
        # What waited while the service was slow or away goes in few requests.
        while len(complete) * int(self._description["world_size"]) < MOST_VALUES:
            more = self._inbox.take_more(message.trial)
            if more is None:
                break
            complete += self._steps.add(more)
            memory = more.memory or memory  # of all until then
        if not complete or not self.is_tuning:
            return None  # The steps before a switch count, but not those of the last trial.
        told = message.trial, complete, memory
        return self._connection.call(lambda service: service.observe(*told))

    def _send_event(self, event: Event) -> JobState:
        # The next steps are of another configuration, or there are none.
        if event.kind in ("drift", "ended"):
            progress = self._renewal.take_progress(at_once=True)
            if progress is not None:
                self._connection.renew(progress)
        if event.kind in VOIDING:
            # The ranks are at the default now, whatever they were told before, or will be.
            self._forget_commands()
        if event.kind in GIVING_UP:
            self._kept = self._description["default_configuration"]
        told = event.kind, event.trial, event.step, event.message, event.seconds, event.memory
        state = self._connection.call(lambda service: service.event(*told))
        if event.kind == "disagreement":
            self._disagreements += 1
            if self._disagreements >= MOST_DISAGREEMENTS:
                raise _Hopeless(f"{DISAGREED} ({event.message})")
        return state

    def _send_profile(self, recording: Recording) -> JobState | None:
        if self._profile_refusals >= MOST_REFUSALS:
            return None
        profile = recording.read()
        try:
            state = self._connection.call(lambda service: service.profile(recording.trial, profile))
        except ServiceRefused as error:
            # A tuning does without them.
            self._profile_refusals += 1
            if self._profile_refusals == MOST_REFUSALS:
                logger.info("autotune: the service does not accept profiles of steps (%s)", error)
            return None
        self._profile_refusals = 0
        return state

    def _look_for_drift(self, complete: list[StepTimes]) -> JobState | None:
        self._renewal.watched(complete)
        found = [(step.step, self._watch.add(step.step, max(step.seconds))) for step in complete]
        state = None
        # Only now: a drift that is refused must not keep the watch from the steps after it.
        for step, drift in found:
            if drift is not None:
                change = (
                    f"a step took {drift.before_seconds * 1e3:.3g} ms after the tuning, and now "
                    f"takes {drift.now_seconds * 1e3:.3g} ms"
                )
                logger.info("autotune: %s", change)
                state = self._send_event(Event("drift", None, step, change, drift.now_seconds))
        return state

    def _follow(self, state: JobState) -> None:
        """Tell the ranks what the service wants now, if that is new."""
        if state.trial is not None:
            self._trials.tell(state.trials_measured, state.max_trials, state.speedup)
        is_new = state.trial != self._commanded and not (state.trial is None and state.deciding)
        rests = state.trial is not None and self.absence.rests
        copy = self._take_copy() if is_new and not rests else None
        # Asked again: while the copy was waited for, the ranks may have left their trial.
        rests = state.trial is not None and self.absence.rests
        self._poll_seconds = self._next_poll() if state.deciding or rests else None
        if rests or not is_new:
            return
        if state.trial is None:
            self._kept = state.configuration
            # At the end of a training the service answers with the round before, if with any.
            if state.summary is not None and not self._stopping.is_set():
                announce(logger, "autotune: %s", state.summary)
                self._before = before_that(state.round, state.summary)
        elif not self.is_tuning:
            announce(logger, "autotune: the job is being tuned again (round %d)", state.round)
            self._trials = TrialLines(logger)
        told = told_of(state, self._description["default_configuration"])
        self._order(state.trial, state.configuration, told, copy=copy)
        self._commanded = state.trial

    def _next_poll(self) -> float:
        if self._poll_seconds is None:
            return FIRST_POLL_SECONDS
        return min(POLLS_APART * self._poll_seconds, LAST_POLL_SECONDS)

    def _leave_trial(self) -> bool:
        """The service is away, and what it had the ranks try may be slow. On the training thread,
        while this one waits for an answer. Returns whether there was a trial."""
        if not self._is_trying:
            return False
        default = self._description["default_configuration"]
        # What was kept may be what the service has yet to be told of.
        best = default if self._inbox.has_event(GIVING_UP) else self._kept
        logger.warning(
            "autotune: the ranks use %s until the service answers again",
            "their default configuration" if best == default else "what was confirmed before",
        )
        waiting = {"state": "waiting", "reason": "the service is away"}
        self._order(None, best, waiting, waits=True)
        self._forget_commands()
        return True

    def _forget_commands(self) -> None:
        """Forget what the ranks were told: whatever the service wants next is new to them."""
        self._commanded = object()

    def _take_copy(self) -> str | None:
        """Take a copy of what is known by now, for the other nodes, and keep it on this one."""
        if self._handover is None or (copy := self._connection.copy()) is None:
            return None
        return self._handover.share(copy)

    def _order(
        self,
        trial: int | None,
        configuration: Mapping[str, Any],
        told: Mapping[str, Any],
        *,
        waits: bool = False,
        watch: bool = True,
        copy: str | None = None,
    ) -> None:
        self._is_trying = trial is not None
        command: dict[str, Any] = {"trial": trial, "watch": watch, "told": told}
        command["configuration"] = dict(configuration)
        if waits:
            command["waits"] = True
        if copy is not None:
            command["copy"] = copy
        # Packed: what is too long for a report comes a step later.
        text = json.dumps(command, separators=(",", ":"))
        self._put_command(zlib.compress(text.encode()), waits or not watch)


def told_of(state: JobState, default: Mapping[str, Any]) -> dict[str, Any]:
    """Return what all ranks shall know of where their job stands."""
    if state.trial is None:
        result = {**state.result, "summary": state.summary or ""}
        return {"state": "finished", "round": state.round, **result}
    best = dict(state.incumbent or {})
    if best.get("algorithm") == default.get("algorithm"):
        best.pop("algorithm", None)  # The wrapper's own needs no name.
    told = {"state": "tuning", "round": state.round, "trials": state.trials_measured}
    return {**told, **({"best": best, "speedup": state.speedup} if best else {})}


class _Hopeless(Exception):
    """Tuning this job leads nowhere; the message says why."""

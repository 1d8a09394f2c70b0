"""Decisions beside the requests: no rank waits while a Gaussian process is fitted. Of each job one
is made at a time, by whatever replica is the first.

It decides, which takes long, without a transaction open; then it makes the move in one, unless the
job has moved on meanwhile. What the tuner does is told to a ``TunerListener``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from bagua_autotune.deciding.next_step import NextStep
from bagua_autotune.measuring.rounds import Round
from bagua_autotune.model.job import RUNS, Event, Job, Observation, Result, Trial
from bagua_autotune.model.knobs import repeats_change
from bagua_autotune.model.reasons import (
    DIVERGED_CODE,
    GIVING_UP,
    HARM,
    INFEASIBLE_CODE,
    NO_REASON,
    failure_code,
)
from bagua_autotune.model.received import Memory
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.model.text import clean
from bagua_autotune.store import Store
from bagua_autotune.store.errors import UnknownJob
from bagua_autotune.store.trials import Move

logger = logging.getLogger(__name__)

# Fits are bound by Python's lock: more at once only slow the requests down.
MOST_AT_ONCE = 2

SUPERFLUOUS = "a decision was not needed any more: the job had moved on meanwhile"


class TunerListener:
    """A listener is told what the tuner does; override what is of interest."""

    def on_heard(self, job_id: str) -> None:
        """The job's ranks said something to this process."""

    def on_observed(self, job: Job, observations: Sequence[Observation]) -> None:
        """Called when steps were reported and stored for the first time."""

    def on_measured(self, job: Job, trial: Trial) -> None:
        """A trial was closed with an estimate."""

    def on_decided(self, seconds: float) -> None:
        """A decision on what follows took so long."""

    def on_superfluous(self) -> None:
        """A decision was not needed: another replica, or a failed trial, had moved the job on."""

    def on_round(self, job: Job) -> None:
        """A finished job is tuned again."""

    def on_result(self, job: Job, result: Result) -> None:
        """A tuning, the first or a later one, ended with this result."""

    def on_saved(self, job: Job, seconds: float) -> None:
        """The job's confirmed speed-up saved so much in steps that were not counted before."""

    def on_failed(self, error: Exception) -> None:
        """A decision beside the requests failed; it is tried again at the next report."""


class Measured(NamedTuple):
    """A trial that can be closed, by its index, and its estimate."""

    trial: int
    estimate: Estimate


class Ahead(NamedTuple):
    """A trial that runs, by its index: what follows it is chosen before it is measured."""

    trial: int


class Failed(NamedTuple):
    """A trial that the ranks gave up, by its index, and why; ``memory``: that it took, or would
    have taken, where they tell."""

    trial: int
    failure: str
    is_infeasible: bool = False
    memory: Memory | None = None

    @classmethod
    def of(cls, trial: int, event: Event, memory: Memory | None) -> Failed:
        """The trial that an event of GIVING_UP is about."""
        what, code = GIVING_UP[event.kind]
        reason = clean(event.message) or NO_REASON
        is_infeasible = code == INFEASIBLE_CODE
        failure = f"{what}: {reason}" if what == HARM else reason
        return cls(trial, failure, is_infeasible, memory if is_infeasible else None)


class Decisions:
    """Moves jobs on.

    Args:
        next_step: says what follows.
        listeners: are told of measured trials and decisions.
        clock: seconds since the epoch.
        background: where decisions are made.
    """

    def __init__(
        self,
        store: Store,
        next_step: NextStep,
        listeners: Sequence[TunerListener],
        clock: Callable[[], float],
        background: Background,
    ) -> None:
        self._store = store
        self._next = next_step
        self._listeners = listeners
        self._clock = clock
        self._background = background

    def start(self, job_id: str, of: Measured | Ahead | None = None) -> None:
        """Move the job on soon, if its open trial is the one that was measured, or runs, or if none
        is open."""
        self._background.start(job_id, lambda: self._decide(job_id, of))

    def is_busy(self, job_id: str) -> bool:
        """Whether this process decides what follows in the job, or will do so."""
        return self._background.is_busy(job_id)

    def give_up(self, job_id: str, failed: Failed) -> bool:
        """Close this trial, and decide what follows; False if it was given up before, or if the job
        is over."""
        move = Move(
            self._clock(),
            closes=failed.trial,
            failure=failed.failure,
            is_infeasible=failed.is_infeasible,
            memory=failed.memory,
            alike=self._alike(job_id, failed),
        )
        closed = self._store.trials.advance(job_id, move)
        if closed:
            self.start(job_id)
        return closed

    def _alike(self, job_id: str, failed: Failed) -> tuple[int, ...]:
        """The other trials of the round that change the numbers as the harmful one does: what was
        measured of them is no gain, and what was to follow it would do the same harm."""
        if failure_code(failed.failure) != DIVERGED_CODE:
            return ()
        baseline, trials = self._store.jobs.get(job_id).baseline, self._store.trials.of(job_id)
        harmful = trials[failed.trial]
        return tuple(
            trial.index
            for trial in trials
            if trial.index != harmful.index
            and trial.round == harmful.round
            and repeats_change(trial.configuration, harmful.configuration, baseline)
        )

    def _decide(self, job_id: str, of: Measured | Ahead | None) -> None:
        try:
            with self._store.claims.claimed(job_id, self._clock) as is_ours:
                while is_ours and not self._advance(job_id, of):
                    pass  # a trial failed while this was decided
        except UnknownJob:
            logger.info("job %s: deleted before it was decided what follows", job_id)
        except Exception as error:
            for listener in self._listeners:
                listener.on_failed(error)
            raise

    def _advance(self, job_id: str, of: Measured | Ahead | None) -> bool:
        """Make one move, if it is due; False if the job moved on meanwhile."""
        with self._store.database.reading():
            round_ = Round.of(self._store.jobs.get(job_id), self._store.trials.of(job_id))
        if round_.job.is_over or round_.job.protocol in RUNS:  # those decide for themselves
            return True
        round_ = self._with_late_steps(round_)
        job, closed = round_.job, round_.open_trial
        if closed:
            if of is None or of.trial != closed.index:
                return True
            measured = of if isinstance(of, Measured) else self._look_ahead(round_, closed)
            if measured is None:
                return True
            closed = replace(closed, state="measured", estimate=measured.estimate)
            round_ = replace(round_, trials=[*round_.trials[:-1], closed])
        started = time.perf_counter()
        move = self._next.after(round_, closed)
        for listener in self._listeners:
            listener.on_decided(time.perf_counter() - started)
        is_taken = self._store.trials.advance(job_id, move)
        if is_taken:
            if closed and (remark := self._next.remark(round_, closed)):
                logger.info("job %s: %s", job.id, remark)
                self._store.events.add(
                    job.id, Event("note", closed.index, message=remark, at=self._clock())
                )
            self._announce(job, closed, move)
            return True
        logger.info("job %s: %s", job.id, SUPERFLUOUS)
        for listener in self._listeners:
            listener.on_superfluous()
        return False

    def _with_late_steps(self, round_: Round) -> Round:
        """The round with what the last steps of its trials say, which is stored."""
        for late in self._next.with_late_steps(round_):
            assert late.estimate is not None
            if round_.trials[late.index - round_.before].is_open:
                self._store.trials.close_left(
                    round_.job.id, late.index, late.estimate, self._clock()
                )
                for listener in self._listeners:
                    listener.on_measured(round_.job, late)
            else:
                self._store.trials.update_estimate(round_.job.id, late.index, late.estimate)
            known = [late if trial.index == late.index else trial for trial in round_.trials]
            round_ = replace(round_, trials=known)
        return round_

    def _look_ahead(self, round_: Round, running: Trial) -> Measured | None:
        """Open what follows the trial that runs, if that need not be measured for it; else what
        was measured of it meanwhile, if that suffices."""
        started = time.perf_counter()
        following = self._next.ahead(round_, running)
        job_id = round_.job.id
        if following is not None:
            for listener in self._listeners:
                listener.on_decided(time.perf_counter() - started)
            move = Move(self._clock(), next_trial=following, leaves=running.index)
            self._store.trials.advance(job_id, move)
            return None
        costs = self._store.observations.step_costs(job_id, running.index)
        found = self._next.estimate(round_, running, costs)
        return Measured(running.index, found) if found else None

    def _announce(self, job: Job, closed: Trial | None, move: Move) -> None:
        if closed:
            for listener in self._listeners:
                listener.on_measured(job, closed)
        if move.result:
            logger.info("job %s (%s): %s", job.id, job.name, move.result.summary)
            for listener in self._listeners:
                listener.on_result(job, move.result)


class Background(Protocol):
    """Where decisions are made.

    The smallest is::

        class AtOnce:
            def start(self, key, work): work()
            def is_busy(self, key): return False
    """

    def start(self, key: str, work: Callable[[], object]) -> None:
        """Do the work soon, never at the same time as other work of the key.

        Of work that waits for its turn the latest is done.
        """

    def is_busy(self, key: str) -> bool:
        """Whether some of this key is under way, or waits."""


class AtOnce:
    """Decides in the calling thread."""

    def start(self, key: str, work: Callable[[], object]) -> None:
        work()

    def is_busy(self, key: str) -> bool:
        return False


class Pool:
    """A few threads for all jobs. Who asked first comes first; who asks again waits behind the
    others. They end with the process: what one has not stored is decided again later.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, Callable[[], object]] = {}
        self._under_way: set[str] = set()
        self._threads = 0
        self._guard = threading.Lock()

    def start(self, key: str, work: Callable[[], object]) -> None:
        with self._guard:
            self._waiting[key] = work  # one that waits keeps its place
            if self._threads == MOST_AT_ONCE:
                return
            self._threads += 1
        try:
            threading.Thread(target=self._run, name="decisions", daemon=True).start()
        except RuntimeError:  # There is no room for a thread; the next one takes this up.
            with self._guard:
                self._threads -= 1
            raise

    def is_busy(self, key: str) -> bool:
        with self._guard:
            return key in self._under_way or key in self._waiting

    def _run(self) -> None:
        while (turn := self._next_turn()) is not None:
            key, work = turn
            try:
                work()
            except Exception:
                logger.exception(
                    "job %s: a decision failed; it is tried again at the next report", key
                )
            with self._guard:
                self._under_way.discard(key)

    def _next_turn(self) -> tuple[str, Callable[[], object]] | None:
        """The first that waits and is not under way; without one the thread ends."""
        with self._guard:
            key = next((key for key in self._waiting if key not in self._under_way), None)
            if key is None:
                self._threads -= 1
                return None
            self._under_way.add(key)
            return key, self._waiting.pop(key)

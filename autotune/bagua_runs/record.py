"""A search as a job of the store: its runs are trials, and an interrupted search goes on from them.

The search is made again from its beginning; runs that are stored are not made again but answered
from the store. Equal outcomes give equal searches, so it goes on where it was.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from sqlalchemy.exc import SQLAlchemyError

from bagua_autotune.model.job import (
    CONTACT_SECONDS,
    OVER,
    RUNS,
    Api,
    Job,
    Limits,
    Observation,
    Result,
    RunsSpec,
    Trial,
)
from bagua_autotune.model.reasons import RUN_FAILED
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.model.text import clean, describe_count
from bagua_autotune.store import Store
from bagua_autotune.store.errors import UnknownJob, UnknownTrial, trouble
from bagua_autotune.store.trials import Move
from bagua_runs.outcomes import CONFIRM, Outcome
from bagua_runs.space import SearchSpace
from bagua_wire.configuration import Configuration

GONE = "the job was deleted or is written by another search"


class Diverged(Exception):
    """What is stored does not fit the search that is made now, as after a change of release."""


class Record:
    """Where the runs of a search are kept.

    If they cannot be stored the search goes on: that is said in one line, and tried again with the
    next run.

    Args:
        store: None: nothing is kept.
        say: is called with each line for the user.
        clock: seconds since the epoch.
        goes_on: with an interrupted search; not so where that still runs.

    Attributes:
        job_id: of the job; None: there is none yet.
    """

    def __init__(
        self,
        store: Store | None,
        about: About,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.time,
        goes_on: bool = True,
    ) -> None:
        self._store = store
        self._about = about
        self._say = say
        self._clock = clock
        self._goes_on = goes_on
        self._began_at = self._beat_at = clock()
        self._spent_before = 0.0
        self._earlier: Interruption | None = None
        self._decided_at: dict[int, float] = {}
        self._waiting: list[Callable[[Store], object]] = []
        self._is_failing = False
        self.job_id: str | None = None

    @property
    def is_kept(self) -> bool:
        """Whether the same command could go on with the search."""
        return self._store is not None and self.job_id is not None

    @property
    def _known(self) -> list[Known]:
        return self._earlier.runs if self._earlier else []

    def resume(self) -> Mapping[str, Any] | None:
        """Go on with an interrupted search, if there is one.

        Returns:
            The facts of its first run; None: there is none.
        """
        found: list[Interruption | None] = []
        if not self._goes_on:
            return None
        fingerprint, now = self._about.fingerprint, self._began_at
        self._write(lambda store: found.append(take_up(store, fingerprint, now)), is_kept=False)
        earlier = self._earlier = found[0] if found else None
        if earlier is None:
            return None
        job = earlier.job
        self.job_id = job.id
        self._spent_before = job.present_seconds(job.created_at, job.last_contact_at)
        runs = sum(known.outcome is not None for known in earlier.runs)
        self._say(
            f"{describe_count(runs, 'run')} of an interrupted search taken over, begun "
            f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(job.created_at))} "
            f"(bagua-autotune delete {job.id} has it begin anew)"
        )
        return earlier.facts

    def begin(self, space: SearchSpace, facts: Mapping[str, Any]) -> None:
        """Register the job once it is known what is searched.

        Raises:
            Diverged: another search was taken up than the one that begins.
        """
        spec = self._about.spec(space, facts)
        if self._earlier is not None:
            expected = (dict(spec.knobs), Configuration(spec.default_configuration))
            if (dict(self._earlier.job.space), self._earlier.job.baseline) != expected:
                raise Diverged
            return
        told = {name: facts[name] for name in KEPT_FACTS if name in facts}
        job_id = self.job_id = uuid4().hex
        first = Trial(0, "search", Configuration(spec.default_configuration), "running",
                      started_at=self._began_at)  # fmt: skip
        self._write(
            lambda store: store.jobs.create(
                job_id, spec, at=self._began_at, protocol=self._about.protocol,
                data={FACTS: told}, first=first,
            )
        )  # fmt: skip

    def recalled(self, number: int, purpose: str, configuration: Configuration) -> Outcome | None:
        """The outcome of this run of the interrupted search; None: it is to be made.

        Raises:
            Diverged: that run was another one.
        """
        if number > len(self._known):
            return None
        known = self._known[number - 1]
        trial = known.trial
        if (trial.purpose == CONFIRM, trial.configuration) != (purpose == CONFIRM, configuration):
            raise Diverged
        return known.outcome

    def begins(self, number: int, purpose: str, configuration: Configuration) -> None:
        """Note that a run is made."""
        if number <= len(self._known) or self.job_id is None:
            return  # made again; its trial is open
        now = self._decided_at.setdefault(number, self._clock())
        trial = Trial(number - 1, "confirm" if purpose == CONFIRM else "search", configuration,
                      "running", started_at=now)  # fmt: skip
        self._write(lambda store: self._advance(store, Move(now, next_trial=trial), now))

    def ends(self, number: int, outcome: Outcome) -> None:
        """Keep a run that is over."""
        index, now = number - 1, self._clock()
        score, step = outcome.score, closing(index, outcome, now)

        def write(store: Store) -> None:
            assert self.job_id is not None
            if score is not None:
                seen = Observation(number, (score,))
                store.observations.add(self.job_id, index, [seen], now, lambda *_: [outcome.cost])
            self._advance(store, step, now)

        self._write(write)

    def finish(self, result: Result) -> None:
        """Keep the result: the search is over."""
        now = self._clock()

        def write(store: Store) -> None:
            self._advance(store, Move(now, result=result), now)
            store.jobs.end(self.job_id or "", now)

        self._write(write)

    def interrupted(self) -> None:
        """Note that the search ends here for now."""
        now = self._clock()

        def write(store: Store) -> None:
            store.jobs.touch(self.job_id or "", now)
            store.jobs.end(self.job_id or "", now)

        self._write(write)

    def beat(self) -> None:
        """Note from time to time that a run goes on; may be called as often as one likes."""
        now = self._clock()
        if self.job_id is not None and now - self._beat_at >= CONTACT_SECONDS:
            self._beat_at = now
            self._write(lambda store: store.jobs.touch(self.job_id or "", now), is_kept=False)

    def spent_seconds(self, number: int | None = None) -> float:
        """How long the search has taken until it decided on this run, or until now. Of one that was
        resumed, without the time in which it was away."""
        if self._earlier is not None and number is not None and number <= len(self._known):
            job, trial = self._earlier.job, self._known[number - 1].trial
            return job.present_seconds(job.created_at, trial.started_at or job.created_at)
        now = self._clock()
        if number is not None:
            # Once for each run: whoever resumes the search finds the same.
            now = self._decided_at.setdefault(number, now)
        return self._spent_before + now - self._began_at

    def forget(self) -> None:
        """Begin anew as another job; the interrupted one stays as it is."""
        self._say("the interrupted search does not fit this one, which begins anew")
        self.interrupted()
        self.job_id = self._earlier = None
        self._waiting = []
        self._spent_before = 0.0
        self._decided_at.clear()

    def _advance(self, store: Store, step: Move, now: float) -> None:
        job_id = self.job_id or ""
        if not store.trials.advance(job_id, step):
            # A service may have taken it for lost, as after the sleep of a machine.
            if store.jobs.contact(job_id).phase not in OVER:
                raise UnknownJob(job_id)
            store.jobs.resume(job_id, now)
            if not store.trials.advance(job_id, step):
                raise UnknownJob(job_id)
        store.jobs.touch(job_id, now)

    def _write(self, work: Callable[[Store], object], is_kept: bool = True) -> None:
        """Do what is to be stored, and before it what could not be stored until now.

        Args:
            is_kept: whether it is tried again later if it fails.
        """
        if self._store is None or (is_kept and self.job_id is None):
            return
        todo = [*self._waiting, work]
        try:
            while todo:
                todo[0](self._store)
                todo.pop(0)
            self._is_failing = False
        except (UnknownJob, UnknownTrial):
            self._say(f"the search goes on without being stored: {GONE}")
            self._store = None
        except SQLAlchemyError as error:
            if not self._is_failing:
                self._say(f"the search goes on, but is not stored at present: {trouble(error)}")
            self._is_failing = True
        self._waiting = todo if is_kept else todo[:-1]


# How a search is written as a job of the store, and read from it.

FACTS = "facts"
KEPT_FACTS = ("backend", "has_client", "ranks", "device")


@dataclass(frozen=True)
class About:
    """What is known of a search before its first run.

    Attributes:
        name: of the job.
        fingerprint: equal for searches that go on with one another.
        limits: those that are shown.
        has_seconds: whether a score is the seconds of a step.
    """

    name: str
    fingerprint: str
    limits: Limits
    has_seconds: bool

    @property
    def protocol(self) -> Api:
        return "runs" if self.has_seconds else "scores"

    def spec(self, space: SearchSpace, facts: Mapping[str, Any]) -> RunsSpec:
        """What the job is registered with; ``facts`` are those of the first run."""
        ranks = facts.get("ranks") or 1
        named = {name: clean(str(facts.get(name, ""))) for name in ("backend", "device")}
        return RunsSpec(
            name=self.name,
            world_size=ranks,
            ranks_per_node=(ranks,),
            knobs={setting.name: setting.domain for setting in space.settings},
            default_configuration=dict(space.settings_of(space.own)),
            fingerprint=self.fingerprint,
            limits=self.limits,
            software={name: word for name, word in named.items() if word},
        )


@dataclass(frozen=True)
class Known:
    """A run of an interrupted search. ``outcome`` is None of the one that was cut short."""

    trial: Trial
    outcome: Outcome | None


@dataclass(frozen=True)
class Interruption:
    """A search that was interrupted, as it is stored, with its runs in order."""

    job: Job
    runs: list[Known]

    @property
    def facts(self) -> Mapping[str, Any]:
        """Of its first run."""
        found: Mapping[str, Any] = self.job.data.get(FACTS, {})
        return found


def take_up(store: Store, fingerprint: str, at: float) -> Interruption | None:
    """Have an interrupted search go on from now, if there is one."""
    job = store.jobs.latest(protocols=RUNS, fingerprint=fingerprint)
    if job is None or job.result is not None:
        return None
    if job.ended_at is None:  # it was killed
        store.jobs.end(job.id, at)
    store.jobs.resume(job.id, at)
    seen = {index: told.values[0] for index, told in store.observations.of(job.id)}
    job = store.jobs.get(job.id)
    trials = store.trials.of(job.id)
    return Interruption(job, [Known(t, _outcome(job, t, seen.get(t.index))) for t in trials])


def closing(index: int, outcome: Outcome, at: float) -> Move:
    """What closes the trial of a run that is over."""
    if outcome.cost is not None:
        return Move(at, index, Estimate(outcome.cost, outcome.standard_error, 1))
    failure = clean(outcome.failure)
    if outcome.is_out_of_memory:
        return Move(at, index, failure=failure, is_infeasible=True)
    return Move(at, index, failure=f"{RUN_FAILED}: {failure}")


def _outcome(job: Job, trial: Trial, score: float | None) -> Outcome | None:
    if trial.is_open or trial.started_at is None or trial.ended_at is None:
        return None
    seconds = job.present_seconds(trial.started_at, trial.ended_at)
    if trial.estimate is not None:
        error = trial.estimate.standard_error
        return Outcome(score, trial.estimate.center, error, seconds=seconds)
    failure = (trial.failure or "").removeprefix(f"{RUN_FAILED}: ")
    is_short = trial.state == "infeasible"
    return Outcome(failure=failure, seconds=seconds, is_out_of_memory=is_short)


# Whether another process of this machine makes the same search.

PREFIX = "\0bagua-autotune-"


@contextmanager
def alone(key: str) -> Iterator[bool]:
    """False if another process is in a block with this key.

    It is known by a name of a socket that is no file (Linux: the abstract namespace), so nothing is
    left of a process that was killed, and the processes that it started do not hold it.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as held:
        try:
            held.bind(PREFIX + key)
        except OSError:
            yield False
            return
        yield True

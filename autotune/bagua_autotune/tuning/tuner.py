"""The tuner: takes in what the ranks tell of a job and moves the job on.

Both HTTP protocols stand on it.  It decides (which takes long: a Gaussian process is
fitted) without a transaction open and with a lock that only the same job waits for; then
it takes the step in one transaction, unless another replica was faster.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

from bagua_autotune.model import job as model
from bagua_autotune.model.job import Event, Job, JobSpec, Observation, Trial
from bagua_autotune.model.knobs import Configuration
from bagua_autotune.model.profile import Profile
from bagua_autotune.model.statistics import Estimate, estimate
from bagua_autotune.model.text import clean, describe
from bagua_autotune.search import Searcher, make_searcher
from bagua_autotune.search.candidates import enumerate_candidates
from bagua_autotune.store import Step, Store
from bagua_autotune.tuning.decision import Keep, Propose, baseline_estimate, decide, incumbent
from bagua_autotune.tuning.measurement import measured, warmup_steps
from bagua_autotune.tuning.objective import OBJECTIVES
from bagua_autotune.tuning.report import make_result, revoke
from bagua_autotune.tuning.status import JobStatus, TrialStatus, job_status, trial_statuses

logger = logging.getLogger(__name__)


FALLBACK_SEARCHER = "random"
JOBS_REMEMBERED = 64


class TunerListener:
    """Is told what the tuner does; override what is of interest."""

    def on_measured(self, job: Job, trial: Trial) -> None:
        """A trial was closed with an estimate."""

    def on_decided(self, seconds: float) -> None:
        """A decision on what follows took so long."""


class WrongStep(Exception):
    """A step does not have exactly one value of each rank, or a profile of each tensor."""


class TrialNotNamed(Exception):
    """A disagreement does not say which of the job's trials the ranks did not agree on."""


class Tuner:
    """Registers jobs, takes observations and events, proposes trials, finishes jobs.

    Methods raise UnknownJob and UnknownTrial of the store.

    Args:
        store: where everything is kept; the tuner itself keeps nothing.
        searcher: name of the search method, see bagua_autotune.search.
        listeners: are told of measured trials and decisions.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        store: Store,
        searcher: str = "bayesian",
        listeners: Sequence[TunerListener] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self._searcher = searcher
        self._listeners = listeners
        self._clock = clock
        self._has_told_failure = False
        # They never change and take long to cut; an id may be used again once it is pruned.
        self._candidates = lru_cache(maxsize=JOBS_REMEMBERED)(self._enumerate)
        self._locks: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        self._locks_guard = threading.Lock()

    def register(
        self,
        job_id: str,
        spec: JobSpec,
        protocol: model.Protocol = "v2",
        data: dict[str, Any] | None = None,
    ) -> bool:
        """Register a job, or resume an ended one. True if it is new.

        Raises:
            JobConflict: it exists with other content.
        """
        now = self._clock()
        is_new = self.store.create_job(job_id, spec, at=now, protocol=protocol, data=data)
        if is_new:
            logger.info(
                "job %s (%s): registered, %d ranks, %d tensors, default %s",
                job_id,
                spec.name,
                spec.world_size,
                len(spec.tensors),
                describe(spec.default_configuration),
            )
        else:
            self.store.resume_job(job_id, now)
        self._advance(job_id)
        return is_new

    def observe(self, job_id: str, index: int, observations: Sequence[Observation]) -> int:
        """Take in steps of a trial; returns how many were new.

        Raises:
            WrongStep: a step without exactly one value of each rank.
        """
        world_size = self.store.job(job_id).world_size
        for observation in observations:
            if len(observation.values) != world_size:
                raise WrongStep(
                    f"step {observation.step} has {len(observation.values)} values, "
                    f"the world size is {world_size}"
                )
        new = self.store.add_observations(job_id, index, observations, self._clock())
        self._advance(job_id)
        return new

    def take_profile(self, job_id: str, index: int, profile: Profile) -> None:
        """Take in a profiled step of a trial; one more than enough is not kept.

        Raises:
            WrongStep: not exactly one ready time of each tensor, or more buckets than tensors.
        """
        tensors = len(self.store.tensors(job_id))
        if len(profile.ready_seconds) != tensors:
            raise WrongStep(
                f"ready_seconds has {len(profile.ready_seconds)} values, "
                f"the job has {tensors} tensors"
            )
        if len(profile.buckets) > tensors:
            raise WrongStep(
                f"buckets: {len(profile.buckets)} are more than the job's {tensors} tensors"
            )
        self.store.add_profile(job_id, index, profile, self._clock())

    def close_trial(
        self, job_id: str, index: int, values: Sequence[Observation] | None = None
    ) -> bool:
        """Close this trial now and move on, whatever measurement would say.

        For protocols that close trials themselves.

        Args:
            values: what to estimate from; by default all observations of the trial.

        Returns:
            False if the trial is not the open one, or was never observed.
        """
        if values is None:
            values = [observation for _, observation in self.store.observations(job_id, index)]
        if not values:
            return False
        found = self._estimate(self.store.job(job_id), values)
        return self._advance(job_id, index, estimated=found)

    def reestimate(self, job_id: str, index: int, values: Sequence[Observation]) -> None:
        """Estimate a measured trial anew, after observations that came late."""
        if values:
            found = self._estimate(self.store.job(job_id), values)
            self.store.update_estimate(job_id, index, found)

    def take_event(self, job_id: str, event: Event) -> None:
        """Take in an event; its time is set here.

        Raises:
            TrialNotNamed: the ranks of a job that is tuned disagreed on nobody knows what.
        """
        now = self._clock()
        job = self.store.job(job_id)
        if event.kind == "disagreement" and event.trial is None and not job.is_over:
            raise TrialNotNamed("a disagreement names the trial while the job is tuned")
        if event.trial is not None:
            if event.kind == "switched":
                self.store.start_trial(job_id, event.trial, now)
            else:
                self.store.trial(job_id, event.trial)
        self.store.add_event(job_id, replace(event, at=now))
        if event.kind == "ended":
            self.store.end_job(job_id, now)
            logger.info("job %s: training ended", job_id)
        elif event.kind == "disagreement":
            reason = clean(event.message) or "no reason given"
            logger.error("job %s: the ranks disagreed: %s", job_id, reason)
            if event.trial is not None:
                self._advance(job_id, event.trial, failure=reason)
            elif job.result and job.result.kept == "winner":
                revoked = revoke(job.result, job, f"the ranks disagreed: {reason}")
                self.store.replace_result(job_id, revoked)
        else:
            self._advance(job_id)

    def open_trial(self, job_id: str) -> Trial | None:
        """The trial that the ranks shall run now; None once the job is finished."""
        trials = self.store.trials(job_id)
        return trials[-1] if trials and trials[-1].is_open else None

    def status(self, job_id: str) -> JobStatus:
        job = self.store.job(job_id)
        objective = OBJECTIVES[job.protocol]
        trials = self.store.trials(job_id)
        return job_status(job, trials, objective, self._clock(), self.is_deciding(job_id))

    def is_deciding(self, job_id: str) -> bool:
        """Whether what follows in the job is being decided at this moment."""
        with self._locks_guard:
            lock = self._locks.get(job_id)
        return lock is not None and lock.locked()

    def trials(self, job_id: str) -> list[TrialStatus]:
        job = self.store.job(job_id)
        return trial_statuses(job, self.store.trials(job_id), OBJECTIVES[job.protocol])

    def _advance(
        self,
        job_id: str,
        closes: int | None = None,
        estimated: Estimate | None = None,
        failure: str | None = None,
    ) -> bool:
        """Move the job on as far as it goes; False if ``closes`` is not the open trial."""
        with self._lock(job_id):
            while True:
                job, trials = self.store.job(job_id), self.store.trials(job_id)
                if job.is_over:
                    return False
                current = trials[-1] if trials and trials[-1].is_open else None
                if closes is not None and (current is None or current.index != closes):
                    return False
                if current:
                    if closes is None:
                        estimated = self._measured(job, trials, current)
                    if estimated is None and failure is None:
                        return False
                    state: model.TrialState = "failed" if failure else "measured"
                    current = replace(current, state=state, estimate=estimated, failure=failure)
                    trials = [*trials[:-1], current]
                step = self._decide(job, trials, current)
                if self.store.advance(job_id, step):
                    self._announce(job, current, step)
                    return True

    def _decide(self, job: Job, trials: Sequence[Trial], closing: Trial | None) -> Step:
        started = time.perf_counter()
        objective = OBJECTIVES[job.protocol]
        decision = self._decide_with(self._searcher, job, trials)
        at = self._clock()
        step = Step(at)
        if closing:
            step = Step(at, closing.index, closing.estimate, closing.failure)
        if isinstance(decision, Propose):
            trial = Trial(len(trials), decision.purpose, decision.configuration)
            step = replace(step, next_trial=trial)
        else:
            steps = self.store.count_observations(job.id)
            result = make_result(job, trials, decision, objective, steps, at)
            step = replace(step, result=result)
        for listener in self._listeners:
            listener.on_decided(time.perf_counter() - started)
        return step

    def _decide_with(self, method: str, job: Job, trials: Sequence[Trial]) -> Propose | Keep:
        """Decide by a search method; by the random one if it fails, so that no job is held up."""

        def new_searcher(allowed: Sequence[Configuration]) -> Searcher:
            # Seeded by what is tuned: another replica, or a restarted one, decides the same.
            seed = zlib.crc32(job.fingerprint.encode())
            return make_searcher(method, job.space, allowed, seed)

        candidates = self._candidates(job.id, job.created_at)
        try:
            return decide(job, candidates, trials, OBJECTIVES[job.protocol], new_searcher)
        except Exception as error:
            if method == FALLBACK_SEARCHER:
                raise
            # Its traceback once: it fails for many trials in the same way.
            told, self._has_told_failure = self._has_told_failure, True
            logger.error(
                "job %s: the %s search failed (%r); trial %d is chosen by the %s one",
                job.id,
                method,
                error,
                len(trials),
                FALLBACK_SEARCHER,
                exc_info=None if told else error,
            )
            return self._decide_with(FALLBACK_SEARCHER, job, trials)

    def _enumerate(self, job_id: str, _created_at: float) -> list[Configuration]:
        job = self.store.job(job_id)
        return enumerate_candidates(job.space, job.baseline, self.store.tensors(job_id))

    def _measured(self, job: Job, trials: Sequence[Trial], trial: Trial) -> Estimate | None:
        """The open trial's estimate if its observations suffice to close it."""
        objective = OBJECTIVES[job.protocol]
        if not objective.closes_itself:
            return None
        costs = [
            objective.cost(observation.values)
            for _, observation in self.store.observations(job.id, trial.index)
        ]
        seconds = [objective.seconds(cost) or 0.0 for cost in costs]
        first: int | None = 0
        if trial.index == 0:
            first = warmup_steps(seconds, job.limits.warmup_seconds)
        if first is None:
            return None
        baseline, best = baseline_estimate(job, trials), incumbent(trials)
        # A confirming trial is measured to the end: stopping it early would favour one side.
        rival = best.estimate if best and trial.purpose == "search" else None
        scale = objective.scale(baseline.center) if baseline else 1.0
        return measured(costs[first:], seconds[first:], job.limits, rival, scale)

    def _estimate(self, job: Job, observations: Sequence[Observation]) -> Estimate:
        objective = OBJECTIVES[job.protocol]
        return estimate([objective.cost(observation.values) for observation in observations])

    def _lock(self, job_id: str) -> threading.Lock:
        """Spares threads the same long decision; that one of them counts is the store's care."""
        with self._locks_guard:
            return self._locks.setdefault(job_id, threading.Lock())

    def _announce(self, job: Job, closed: Trial | None, step: Step) -> None:
        if closed and closed.state == "measured":
            for listener in self._listeners:
                listener.on_measured(job, closed)
        if step.result:
            logger.info("job %s (%s): %s", job.id, job.name, step.result.summary)

"""Bagua's four requests, carried out on the shared tuner.

A worker registers, asks at iteration 0, then reports and asks every 100 iterations.  A trial
is measured by the reports made under its hyperparameters and closes at an ask at which all
ranks stand at the same iteration, so that all of them switch there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any
from weakref import WeakValueDictionary

from bagua_autotune.model.buckets import Tensor
from bagua_autotune.model.job import Job, Limits, Observation
from bagua_autotune.model.knobs import Configuration
from bagua_autotune.store import ranks
from bagua_autotune.tuning.bagua import hyperparameters
from bagua_autotune.tuning.bagua.directory import Directory
from bagua_autotune.tuning.bagua.names import stem
from bagua_autotune.tuning.bagua.state import BaguaState, Grant, Window
from bagua_autotune.tuning.bagua.windows import bounded, comparable
from bagua_autotune.tuning.tuner import Tuner

logger = logging.getLogger(__name__)

DEFAULT_BUCKET_BYTES = 10 * 1024**2
# A trial needs no more windows than this; each is the mean of 100 iterations already.
ENOUGH_WINDOWS = 2


class RankOutsideWorld(ValueError):
    """A rank that cannot exist in a job of this world size."""


class BaguaTuning:
    """What Bagua's ``AutotuneService`` did, on the store and the tuner.

    Args:
        world_size: how many ranks a job has; None: those seen.
        default_bucket_bytes: the baseline of every job.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        tuner: Tuner,
        limits: Limits,
        world_size: int | None = None,
        default_bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._tuner = tuner
        self._store = tuner.store
        self._world_size = world_size
        self._default_bucket_bytes = default_bucket_bytes
        self._clock = clock
        self._directory = Directory(tuner, limits, world_size, clock)
        self._locks: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        self._locks_guard = threading.Lock()
        # A job's tensors never change, and every answer needs them.
        self._tensors = lru_cache(maxsize=64)(self._store.tensors)

    def register(
        self, model_name: str, tensors: Sequence[Tensor], whether_to_bucket: bool = True
    ) -> dict[str, Any]:
        """Register a model; returns its hyperparameters so far.

        Under a per-process name that is the baseline: which of several twin models it is shows
        when its rank asks, which a worker does before it trains.
        """
        size = self._default_bucket_bytes if whether_to_bucket else hyperparameters.UNBUCKETED_BYTES
        job = self._directory.register(model_name, tensors, size)
        if stem(model_name) != model_name:
            return hyperparameters.to_wire(tensors, job.baseline)
        state = BaguaState.of(job.data)
        return self._to_wire(job, state, state.grant)

    def ask(self, model_name: str, rank: int, iteration: int) -> tuple[dict[str, Any], bool]:
        """The hyperparameters to use from now on, and whether they are final.

        Raises:
            NotRegistered: nobody registered the model.
            RankOutsideWorld: there is no such rank.
        """
        self._check_rank(rank)
        job = self._directory.find(model_name, rank)
        with self._lock(job.id):
            job = self._store.job(job.id)
            state = BaguaState.of(job.data)
            is_due = state.is_due(rank, iteration, self._world_size)
            decision = self._decide(job, state, iteration) if is_due else None
            state = self._update(job, lambda s: s.arrive(rank, iteration, decision, is_due))
        grant = state.grant_at(iteration)
        return self._to_wire(job, state, grant), grant.is_final

    def report(
        self, model_name: str, rank: int, iteration: int, ran: Configuration, speed: float
    ) -> None:
        """One rank's mean speed since its last report, under the configuration it ran.

        Raises:
            NotRegistered: nobody registered the model.
            RankOutsideWorld: there is no such rank.
        """
        self._check_rank(rank)
        speed = bounded(speed)
        job = self._directory.find(model_name, rank)
        with self._lock(job.id):
            state = BaguaState.of(self._store.job(job.id).data)
            is_warming_up = state.grant.trial is None and not state.grant.is_final
            if is_warming_up and ran == job.baseline:
                window = Window(iteration=iteration, speed=speed)
                self._update(job, lambda s: s.seen(rank).warmed(window))
                return
            if rank not in state.board:
                self._update(job, lambda s: s.seen(rank))
            index = self._trial_of(job, state.grant, iteration, ran)
            if index is None:
                return
            now = self._clock()
            is_new = ranks.put_value(self._store, job.id, index, iteration, rank, speed, now)
            if is_new and index != state.grant.trial:
                self._tuner.reestimate(job.id, index)

    def order(self, names: Iterable[str]) -> None:
        """Tensors became ready in this order, in some model: spans do not say in which.

        A name counts for every job that has such a tensor and is still tuned; names that no
        job has are dropped.
        """
        names = list(dict.fromkeys(names))
        for job in self._store.jobs():
            if job.protocol != "v1" or job.phase not in ("tuning", "confirming"):
                continue
            known = {tensor.name for tensor in self._tensors(job.id)}
            known.difference_update(BaguaState.of(job.data).order)
            new = [name for name in names if name in known]
            if new:
                self._update(job, partial(BaguaState.ordered, names=new))

    def _decide(self, job: Job, state: BaguaState, iteration: int) -> Grant | None:
        """What all ranks switch to at this iteration; None: they go on as they are."""
        grant, now = state.grant, self._clock()
        if grant.is_final:
            return None
        elapsed_seconds = now - grant.at
        if grant.trial is None:
            is_over = elapsed_seconds >= job.limits.warmup_seconds or state.is_warm()
            if not state.warm_up or not is_over:
                return None
            logger.info("job %s: warm, measuring the baseline", job.id)
        else:
            windows = self._windows(job, state, grant.trial)
            is_long = elapsed_seconds >= job.limits.trial_seconds
            if not windows or (len(windows) < ENOUGH_WINDOWS and not is_long):
                return None
            self._tuner.close_trial(job.id, grant.trial, windows)
        return self._next_grant(job, state, iteration)

    def _windows(self, job: Job, state: BaguaState, index: int) -> list[Observation]:
        """What was reported under a trial, as far as it can be compared with other trials."""
        observed = self._store.observations(job.id)
        windows = [window for trial, window in observed if trial == index]
        rank_count = self._world_size or len(state.board)
        found = comparable(windows, [window for _, window in observed], rank_count)
        if not found and len(windows) > ENOUGH_WINDOWS:
            return windows  # a rank that never reports must not stop the tuning
        return found

    def _next_grant(self, job: Job, state: BaguaState, iteration: int) -> Grant | None:
        job, trial = self._store.job(job.id), self._tuner.open_trial(job.id)
        configuration = trial.configuration if trial else None
        if job.result is not None:
            configuration = job.result.configuration
        if configuration is None:
            return None
        return Grant(
            from_iteration=iteration,
            configuration=dict(configuration),
            trial=trial.index if trial else None,
            ordered=len(state.order),
            is_final=job.result is not None,
            at=self._clock(),
        )

    def _trial_of(self, job: Job, grant: Grant, iteration: int, ran: Configuration) -> int | None:
        """The trial that a report measures: the current one, else an earlier one it came late for.

        The windows of a trial are those that ended after it was granted.
        """
        if ran == Configuration(grant.configuration) and iteration > grant.from_iteration:
            return grant.trial
        earlier = [
            trial.index
            for trial in self._store.trials(job.id)
            if trial.configuration == ran and not trial.is_open and trial.index != grant.trial
        ]
        return earlier[-1] if earlier else None

    def _to_wire(self, job: Job, state: BaguaState, grant: Grant) -> dict[str, Any]:
        order = state.order[: grant.ordered]
        tensors = hyperparameters.in_execution_order(self._tensors(job.id), order)
        return hyperparameters.to_wire(tensors, grant.configuration)

    def _update(self, job: Job, change: Callable[[BaguaState], BaguaState]) -> BaguaState:
        def changed(data: ranks.Data) -> ranks.Data:
            return change(BaguaState.of(data)).model_dump(mode="json")

        return BaguaState.of(ranks.update_data(self._store, job.id, changed))

    def _check_rank(self, rank: int) -> None:
        if self._world_size is not None and rank >= self._world_size:
            raise RankOutsideWorld(f"rank {rank} is not below the world size {self._world_size}")

    def _lock(self, job_id: str) -> threading.Lock:
        """Taken by all requests of a job, so that the first rank's decision is the others' too."""
        with self._locks_guard:
            return self._locks.setdefault(job_id, threading.Lock())

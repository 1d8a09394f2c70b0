"""Carries decisions out: of each job one is made at a time, by whatever replica is the first.

It decides, which takes long, beside the requests and without a transaction open; then it takes the
step in one, unless the job has moved on meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from bagua_autotune.model.job import Job, Trial
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.store import Step, Store, claims, digests
from bagua_autotune.tuning.background import Background
from bagua_autotune.tuning.listener import TunerListener
from bagua_autotune.tuning.next_step import NextStep

logger = logging.getLogger(__name__)

SUPERFLUOUS = "a decision was made for nothing: the job had moved on meanwhile"


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

    def start(
        self, job_id: str, closes: int | None = None, estimated: Estimate | None = None
    ) -> None:
        """Move the job on soon, if its open trial is measured or there is none.

        Args:
            closes: this trial is measured, if it is still open, whatever measurement would say.
            estimated: its estimate.
        """
        self._background.start(job_id, lambda: self._decide(job_id, closes, estimated))

    def is_busy(self, job_id: str) -> bool:
        """Whether this process decides what follows in the job, or will do so."""
        return self._background.is_busy(job_id)

    def fail(self, job_id: str, index: int, failure: str) -> bool:
        """Close this trial, and decide what follows; False if it is not the open one."""
        closed = self._store.advance(job_id, Step(self._clock(), index, failure=failure))
        if closed:
            self.start(job_id)
        return closed

    def _decide(self, job_id: str, closes: int | None, estimated: Estimate | None) -> None:
        try:
            with claims.claimed(self._store, job_id, self._clock) as is_ours:
                while is_ours and not self._advance(job_id, closes, estimated):
                    pass  # a trial failed while this was decided
        except Exception as error:
            for listener in self._listeners:
                listener.on_failed(error)
            raise

    def _advance(self, job_id: str, closes: int | None, estimated: Estimate | None) -> bool:
        """Take one step, if it is due; False if the job moved on meanwhile."""
        with self._store.database.reading():
            job, trials = self._store.job(job_id), self._store.trials(job_id)
        current = trials[-1] if trials and trials[-1].is_open else None
        if job.is_over or (closes is not None and (current is None or current.index != closes)):
            return True
        if current:
            if closes is None:
                costs = digests.costs(self._store, job_id, current.index)
                estimated = self._next.estimate(job, trials, current, costs)
            if estimated is None:
                return True
            current = replace(current, state="measured", estimate=estimated)
            trials = [*trials[:-1], current]
        started = time.perf_counter()
        step = self._next.after(job, trials, current)
        for listener in self._listeners:
            listener.on_decided(time.perf_counter() - started)
        is_taken = self._store.advance(job_id, step)
        if is_taken:
            self._announce(job, current, step)
            return True
        logger.info("job %s: %s", job.id, SUPERFLUOUS)
        for listener in self._listeners:
            listener.on_superfluous()
        return False

    def _announce(self, job: Job, closed: Trial | None, step: Step) -> None:
        if closed:
            for listener in self._listeners:
                listener.on_measured(job, closed)
        if step.result:
            logger.info("job %s (%s): %s", job.id, job.name, step.result.summary)

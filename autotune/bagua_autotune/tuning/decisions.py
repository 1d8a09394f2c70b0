"""Carries decisions out: of each job one is made at a time, and taken as one transaction.

It decides, which takes long, without a transaction open; then it takes the step in one, unless
another replica was faster.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakValueDictionary

from bagua_autotune.model import job as model
from bagua_autotune.model.job import Job, Trial
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.store import Step, Store, digests
from bagua_autotune.tuning.background import Background
from bagua_autotune.tuning.listener import TunerListener
from bagua_autotune.tuning.next_step import NextStep

logger = logging.getLogger(__name__)


class Decisions:
    """Moves jobs on.

    Args:
        next_step: says what follows.
        listeners: are told of measured trials and decisions.
        background: where decisions on measured trials are made.
    """

    def __init__(
        self,
        store: Store,
        next_step: NextStep,
        listeners: Sequence[TunerListener],
        background: Background,
    ) -> None:
        self._store = store
        self._next = next_step
        self._listeners = listeners
        self._background = background
        self._locks: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        self._locks_guard = threading.Lock()

    def start(self, job_id: str) -> None:
        """Move the job on soon, beside the requests."""
        self._background.start(job_id, lambda: self._decide(job_id))

    def is_busy(self, job_id: str) -> bool:
        """Whether what follows in the job is being decided."""
        return self._background.is_busy(job_id)

    def _decide(self, job_id: str) -> None:
        try:
            self.advance(job_id)
        except Exception as error:
            for listener in self._listeners:
                listener.on_failed(error)
            raise

    def advance(
        self,
        job_id: str,
        closes: int | None = None,
        estimated: Estimate | None = None,
        failure: str | None = None,
    ) -> bool:
        """Move the job on as far as it goes; False if ``closes`` is not the open trial."""
        with self._lock(job_id):
            while True:
                job, trials = self._store.job(job_id), self._store.trials(job_id)
                if job.is_over:
                    return False
                current = trials[-1] if trials and trials[-1].is_open else None
                if closes is not None and (current is None or current.index != closes):
                    return False
                if current:
                    if closes is None:
                        costs = digests.costs(self._store, job_id, current.index)
                        estimated = self._next.estimate(job, trials, current, costs)
                    if estimated is None and failure is None:
                        return False
                    state: model.TrialState = "failed" if failure else "measured"
                    current = replace(current, state=state, estimate=estimated, failure=failure)
                    trials = [*trials[:-1], current]
                started = time.perf_counter()
                step = self._next.after(job, trials, current)
                for listener in self._listeners:
                    listener.on_decided(time.perf_counter() - started)
                if self._store.advance(job_id, step):
                    self._announce(job, current, step)
                    return True

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

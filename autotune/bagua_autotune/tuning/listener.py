"""Listeners, which are told what the tuner does; one of them is a service that one training has for
itself."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sqlalchemy.exc import SQLAlchemyError

from bagua_autotune.model.job import Event, Job, Observation, Result, Trial
from bagua_autotune.store import Store

logger = logging.getLogger(__name__)

GONE = "the training process was gone"


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


class InHand(TunerListener):
    """Keeps the jobs whose ranks speak to this process, and ends them when nobody is left to speak
    for them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._job_ids: set[str] = set()

    def on_heard(self, job_id: str) -> None:
        self._job_ids.add(job_id)

    @property
    def has_jobs(self) -> bool:
        return bool(self._job_ids)

    def end(self, at: float) -> None:
        """The training is gone; jobs whose end was told stay as they are."""
        try:
            self._store.jobs.end_gone(list(self._job_ids), Event("ended", message=GONE, at=at))
        except SQLAlchemyError as error:
            logger.error("the jobs of the training cannot be ended: the store failed: %s", error)

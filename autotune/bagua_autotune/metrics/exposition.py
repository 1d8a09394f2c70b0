"""The whole of ``/metrics``: what the service counts, and the jobs of its store.

One process, one registry of its own: the client library's multi-process mode is not used, and
nothing is registered globally.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from prometheus_client import disable_created_metrics
from sqlalchemy.exc import SQLAlchemyError

from bagua_autotune.metrics.jobs import Jobs
from bagua_autotune.metrics.service import ServiceMetrics
from bagua_autotune.metrics.steps import StepHistograms
from bagua_autotune.model.job import Job, Observation
from bagua_autotune.overview import Summaries
from bagua_autotune.store import Store
from bagua_autotune.tuning.listener import TunerListener

logger = logging.getLogger(__name__)

# A second series for each counter, which Prometheus' text format has no use for.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics(TunerListener):
    """Listens to the tuner and answers scrapes."""

    def __init__(self, store: Store, summaries: Summaries) -> None:
        self.service = ServiceMetrics()
        self._steps = StepHistograms()
        self._jobs = Jobs(store, summaries, self._steps)

    def exposition(self) -> bytes:
        """Prometheus's text format; without the jobs while the store cannot be read."""
        try:
            jobs = self._jobs.exposition()
        except SQLAlchemyError as error:
            jobs = b""
            self.service.count_store_error(error)
            logger.error("the metrics are without the jobs: the store failed: %s", error)
        return self.service.exposition() + jobs

    def on_observed(self, job: Job, observations: Sequence[Observation]) -> None:
        self._steps.observe(job, observations)

    def on_decided(self, seconds: float) -> None:
        self.service.proposal_seconds.observe(seconds)

    def on_failed(self, error: Exception) -> None:
        self.service.failed_decisions.inc()
        if isinstance(error, SQLAlchemyError):
            self.service.count_store_error(error)

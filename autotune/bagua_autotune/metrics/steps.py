"""A histogram of the steps that this process was told of, for each job that is shown."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from prometheus_client import Histogram
from prometheus_client.core import Metric

from bagua_autotune.model.job import Job, Observation
from bagua_autotune.tuning.objective import OBJECTIVES

NAME = "bagua_autotune_step_seconds"
HELP = "Steps reported to this process; of each the slowest rank's time."
# Few: a job's share of the exposition is mostly these.
BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# A service that nobody scrapes forgets the jobs it heard of longest ago.
MOST_JOBS = 5000


@dataclass
class _Steps:
    histogram: Histogram
    count: int = 0


class StepHistograms:
    """By job id, so that a new job of the same name begins anew. Thread-safe."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, _Steps] = OrderedDict()
        self._guard = threading.Lock()

    def observe(self, job: Job, observations: Sequence[Observation]) -> None:
        """Count steps of a job; of a protocol without step times nothing."""
        objective = OBJECTIVES[job.protocol]
        found = [objective.seconds(objective.cost(each.values)) for each in observations]
        seconds = [value for value in found if value is not None]
        if not seconds:
            return
        with self._guard:
            steps = self._jobs.setdefault(job.id, _Steps(_empty(job.name)))
            for value in seconds:
                steps.histogram.labels(job.name).observe(value)
            steps.count += len(seconds)
            self._jobs.move_to_end(job.id)
            if len(self._jobs) > MOST_JOBS:
                self._jobs.popitem(last=False)

    def count(self, job_id: str) -> int:
        """How many steps of the job were counted."""
        with self._guard:
            return self._jobs[job_id].count if job_id in self._jobs else 0

    def family(self, job_id: str) -> Metric:
        """The job's histogram; without samples if no step of it was counted."""
        with self._guard:
            if job_id not in self._jobs:
                return Metric(NAME, HELP, "histogram")
            return next(iter(self._jobs[job_id].histogram.collect()))

    def job_ids(self) -> set[str]:
        with self._guard:
            return set(self._jobs)

    def forget(self, job_ids: Collection[str]) -> None:
        with self._guard:
            for job_id in job_ids:
                self._jobs.pop(job_id, None)


def _empty(job_name: str) -> Histogram:
    histogram = Histogram(NAME, HELP, ["job_name"], buckets=BUCKETS, registry=None)
    histogram.labels(job_name)
    return histogram

"""A histogram of the steps that this process was told of, for each job that is shown."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate

from prometheus_client import Histogram
from prometheus_client.core import Metric

from bagua_autotune.measuring.objective import OBJECTIVES
from bagua_autotune.metrics import text
from bagua_autotune.metrics.families import JOB
from bagua_autotune.model.job import Job, Observation

NAME = "bagua_autotune_step_seconds"
HELP = "Step time of the slowest rank, of the steps reported to this process."
# Few: a job's share of the exposition is mostly these.
BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# A service that nobody scrapes forgets the jobs it heard of longest ago.
MOST_JOBS = 5000


class _Steps:
    def __init__(self, job_name: str, label: bytes) -> None:
        self._template = text.Template([_family(job_name)])
        self._label = label
        self.counts = [0] * (len(BUCKETS) + 1)
        self.seconds = 0.0
        self._samples: bytes | None = None

    def add(self, seconds: float) -> None:
        self._samples = None
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.seconds += seconds

    def samples(self) -> bytes:
        if self._samples is None:
            up_to = list(accumulate(self.counts))
            (samples,) = self._template.fill([*up_to, up_to[-1], self.seconds])
            self._samples = text.labelled(samples, self._label)
        return self._samples


class StepHistograms:
    """Histograms by job id, so that a new job of the same name begins anew. Thread-safe.

    Args:
        label: of all samples; none if empty.
    """

    def __init__(self, label: bytes = b"") -> None:
        self._label = label
        self._jobs: OrderedDict[str, _Steps] = OrderedDict()
        self._guard = threading.Lock()

    def observe(self, job: Job, observations: Sequence[Observation]) -> None:
        """Count the steps of a job; none under a protocol without step times."""
        objective = OBJECTIVES[job.protocol]
        found = [objective.seconds(objective.cost(each.values)) for each in observations]
        seconds = [value for value in found if value is not None]
        if not seconds:
            return
        with self._guard:
            if job.id not in self._jobs:
                self._jobs[job.id] = _Steps(job.name, self._label)
            for value in seconds:
                self._jobs[job.id].add(value)
            self._jobs.move_to_end(job.id)
            if len(self._jobs) > MOST_JOBS:
                self._jobs.popitem(last=False)

    def samples(self, job_ids: Iterable[str]) -> dict[str, bytes]:
        """The jobs' histograms as text, as they are now."""
        with self._guard:
            known = [job_id for job_id in job_ids if job_id in self._jobs]
            return {job_id: self._jobs[job_id].samples() for job_id in known}

    def job_ids(self) -> set[str]:
        with self._guard:
            return set(self._jobs)

    def forget(self, job_ids: Collection[str]) -> None:
        with self._guard:
            for job_id in job_ids:
                self._jobs.pop(job_id, None)


def _family(job_name: str) -> Metric:
    """The family of a job without steps."""
    empty = Histogram(NAME, HELP, [JOB], buckets=BUCKETS, registry=None)
    empty.labels(job_name)
    return next(iter(empty.collect()))


HEADER = text.headers([_family("")])

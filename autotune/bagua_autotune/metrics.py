"""What Prometheus scrapes: jobs from the store at the time of the scrape, requests as they come.

No label grows with the number of trials, and jobs that ended or fell silent are left out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import get_args

from flask import Flask, Response, g, request
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bagua_autotune.model.job import Job, JobPhase, Trial, TrialState
from bagua_autotune.store import Store, read_each
from bagua_autotune.tuning.decision import baseline_estimate, incumbent
from bagua_autotune.tuning.objective import OBJECTIVES
from bagua_autotune.tuning.rounds import of_round
from bagua_autotune.tuning.status import speedup
from bagua_autotune.tuning.tuner import TunerListener

SILENT_SECONDS = 3600.0
DECISION_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
REQUEST_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class Metrics(TunerListener):
    """The registry of one app, with what the app itself counts."""

    def __init__(self, store: Store) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(JobCollector(store))
        self._requests = Counter(
            "bagua_autotune_requests",
            "Requests answered.",
            ["route", "method", "code"],
            registry=self._registry,
        )
        self._request_seconds = Histogram(
            "bagua_autotune_request_seconds",
            "Time to answer a request.",
            ["route"],
            buckets=REQUEST_BUCKETS,
            registry=self._registry,
        )
        self._rounds = Counter(
            "bagua_autotune_rounds",
            "Finished jobs that are tuned again, after a lasting change of their step times.",
            registry=self._registry,
        )
        self._decision_seconds = Histogram(
            "bagua_autotune_decision_seconds",
            "Time to decide what follows a trial.",
            buckets=DECISION_BUCKETS,
            registry=self._registry,
        )

    def on_decided(self, seconds: float) -> None:
        self._decision_seconds.observe(seconds)

    def on_round(self, job: Job) -> None:
        self._rounds.inc()

    def exposition(self) -> bytes:
        """Prometheus's text format."""
        return generate_latest(self._registry)

    def watch(self, app: Flask) -> None:
        """Count the app's requests."""

        @app.before_request
        def _start() -> None:
            g.started = time.perf_counter()

        @app.after_request
        def _count(response: Response) -> Response:
            # The rule, not the path: paths hold job ids and whatever clients make up.
            route = request.url_rule.rule if request.url_rule else "unmatched"
            method = request.method if request.url_rule else "any"
            self._requests.labels(route, method, str(response.status_code)).inc()
            self._request_seconds.labels(route).observe(time.perf_counter() - g.started)
            return response


class JobCollector(Collector):
    """Gauges of the jobs heard of lately; of several with one name the newest."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def describe(self) -> Iterable[Metric]:
        return []  # registering must not query the store

    def collect(self) -> Iterator[Metric]:
        label = "job_name"  # "job" is what Prometheus calls the scraped target
        states = GaugeMetricFamily(
            "bagua_autotune_job_state",
            "1 for the state that the job is in.",
            labels=[label, "state"],
        )
        counts = GaugeMetricFamily(
            "bagua_autotune_trials", "Trials of the job by state.", labels=[label, "state"]
        )
        seconds = GaugeMetricFamily(
            "bagua_autotune_step_seconds",
            "Step time under the baseline and under the best trial.",
            labels=[label, "configuration"],
        )
        speedups = GaugeMetricFamily(
            "bagua_autotune_speedup_ratio",
            "Step time of the baseline over that of the final choice, or else the best trial.",
            labels=[label],
        )
        contacts = GaugeMetricFamily(
            "bagua_autotune_job_last_contact_timestamp_seconds",
            "When the job was last heard of, in seconds since the epoch.",
            labels=[label],
        )
        for job, trials, roles, ratio in read_each(self._jobs(), self._read):
            for phase in get_args(JobPhase):
                states.add_metric([job.name, phase], job.phase == phase)
            for state in get_args(TrialState):
                counts.add_metric([job.name, state], sum(t.state == state for t in trials))
            for role, value in roles.items():
                seconds.add_metric([job.name, role], value)
            if ratio is not None:
                speedups.add_metric([job.name], ratio)
            contacts.add_metric([job.name], job.last_contact_at)
        yield from (states, counts, seconds, speedups, contacts)

    def _read(self, job: Job) -> tuple[Job, list[Trial], dict[str, float], float | None]:
        """All that may fail, so that a family never holds half a job."""
        trials = self._store.trials(job.id)
        # After a lasting change the step times of before say nothing.
        latest = of_round(trials, job.round)
        return job, trials, _step_seconds(job, latest), _speedup(job, latest)

    def _jobs(self) -> list[Job]:
        newest: dict[str, Job] = {}
        for job in self._store.active_jobs(time.time() - SILENT_SECONDS):
            newest.setdefault(job.name, job)
        return list(newest.values())


def _step_seconds(job: Job, trials: list[Trial]) -> dict[str, float]:
    best = incumbent(trials)
    estimates = {
        "baseline": baseline_estimate(job, trials),
        "incumbent": best.estimate if best else None,
    }
    objective = OBJECTIVES[job.protocol]
    found = {
        role: objective.seconds(estimate.center) for role, estimate in estimates.items() if estimate
    }
    return {role: seconds for role, seconds in found.items() if seconds is not None}


def _speedup(job: Job, trials: list[Trial]) -> float | None:
    if job.result:
        return job.result.speedup
    best = incumbent(trials)
    return speedup(job, trials, best, OBJECTIVES[job.protocol]) if best else None

"""What a scrape always tells as it is now: a job's state and its last word."""

from __future__ import annotations

from typing import get_args

from prometheus_client.core import GaugeMetricFamily, Metric

from bagua_autotune.model.job import JobPhase
from bagua_autotune.store.contacts import Contact

PHASES: tuple[str, ...] = get_args(JobPhase)
JOB = "job_name"  # "job" is what Prometheus calls the scraped target


def families(name: str | None) -> list[Metric]:
    """Always the same ones in the same order, in need of values; of no job no samples."""
    states = GaugeMetricFamily(
        "bagua_autotune_job_state", "1 for the state that the job is in.", labels=[JOB, "state"]
    )
    last = GaugeMetricFamily(
        "bagua_autotune_job_last_contact_timestamp_seconds",
        "When the job was last heard of, in seconds since the epoch.",
        labels=[JOB],
    )
    started = GaugeMetricFamily(
        "bagua_autotune_job_started_timestamp_seconds",
        "When the job was registered, in seconds since the epoch.",
        labels=[JOB],
    )
    if name is not None:
        for phase in PHASES:
            states.add_metric([name, phase], 0)
        last.add_metric([name], 0)
        started.add_metric([name], 0)
    return [states, last, started]


def values(contact: Contact) -> list[float]:
    """Of all samples of the job, in their order."""
    states = [float(contact.phase == phase) for phase in PHASES]
    return [*states, contact.last_contact_at, contact.created_at]

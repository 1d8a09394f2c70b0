"""What a scrape always tells as it is now: a job's state and its last word."""

from __future__ import annotations

from typing import get_args

from prometheus_client.core import GaugeMetricFamily, Metric

from bagua_autotune.model.job import JobPhase
from bagua_autotune.store.contacts import Contact

JOB = "job_name"  # "job" is what Prometheus calls the scraped target


def families(contact: Contact | None) -> list[Metric]:
    """Always the same ones in the same order; of no job they have no samples."""
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
    if contact:
        for phase in get_args(JobPhase):
            states.add_metric([contact.name, phase], contact.phase == phase)
        last.add_metric([contact.name], contact.last_contact_at)
        started.add_metric([contact.name], contact.created_at)
    return [states, last, started]

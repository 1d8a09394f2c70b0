"""What a list of jobs shows of each."""

from __future__ import annotations

from dataclasses import dataclass

from bagua_autotune.model.job import Protocol
from bagua_autotune.overview.figures import Figures, make_figures
from bagua_autotune.overview.headline import make_headline
from bagua_autotune.overview.reading import Reading
from bagua_autotune.store import Store, digests
from bagua_autotune.tuning.status import JobStatus, job_status

# Enough for a median.
LATEST_PROFILES = 3


@dataclass(frozen=True)
class Summary(JobStatus):
    """A job's state with its figures; times are seconds since the epoch."""

    protocol: Protocol
    world_size: int
    created_at: float
    last_contact_at: float
    ended_at: float | None
    revision: int
    headline: str
    figures: Figures


def make_summary(store: Store, reading: Reading) -> Summary:
    """Of what was read; whether the job is deciding is nothing that is stored."""
    job = reading.job
    profiles = []
    if not any(observation.compute for observation in reading.latest):
        profiles = digests.latest_profiles(store, job.id, LATEST_PROFILES)
    status = job_status(job, reading.round, reading.objective, deciding=False)
    figures = make_figures(reading, profiles)
    return Summary(
        **vars(status),
        protocol=job.protocol,
        world_size=job.world_size,
        created_at=job.created_at,
        last_contact_at=job.last_contact_at,
        ended_at=job.ended_at,
        revision=job.revision,
        headline=make_headline(reading, status.progress, figures),
        figures=figures,
    )

"""Stored jobs as messages: what ``/api/v2`` answers and the command line shows."""

from __future__ import annotations

from bagua_autotune.api import messages, reports
from bagua_autotune.model.job import Observation
from bagua_autotune.overview import Overviews
from bagua_autotune.tuning.status import JobStatus
from bagua_autotune.tuning.tuner import Tuner


def job_state(status: JobStatus) -> messages.JobState:
    return messages.JobState.model_validate(status)


def job_list(overviews: Overviews, name: str | None = None, limit: int = 100) -> messages.JobList:
    """Newest first."""
    found = overviews.summaries(name, limit)
    return messages.JobList(jobs=[messages.JobSummary.model_validate(s) for s in found])


def job_overview(overviews: Overviews, job_id: str) -> messages.JobOverview:
    found = overviews.overview(job_id)
    job = found.job
    return messages.JobOverview.model_validate(
        {
            **vars(found),
            "job": found.summary,
            "default_configuration": job.baseline,
            "ranks_per_node": job.ranks_per_node,
            "software": job.software,
            "fingerprint": job.fingerprint,
            "limits": job.limits,
            "knobs": dict(job.space),
        }
    )


def job_curve(overviews: Overviews, job_id: str) -> messages.Curve:
    return messages.Curve.model_validate(overviews.curve(job_id))


def job_buckets(overviews: Overviews, job_id: str) -> messages.JobBuckets:
    return messages.JobBuckets.model_validate(overviews.buckets(job_id))


def job_detail(tuner: Tuner, job_id: str) -> messages.JobDetail:
    job = tuner.store.job(job_id)
    return messages.JobDetail.model_validate(
        {
            **job_state(tuner.status(job_id)).model_dump(),
            "world_size": job.world_size,
            "ranks_per_node": job.ranks_per_node,
            "tensors": tuner.store.tensors(job_id),
            "knobs": dict(job.space),
            "default_configuration": job.baseline,
            "fingerprint": job.fingerprint,
            "limits": job.limits,
            "software": job.software,
            "protocol": job.protocol,
            "created_at": job.created_at,
            "last_contact_at": job.last_contact_at,
            "ended_at": job.ended_at,
            "is_lost": job.is_lost,
        }
    )


def trial_list(tuner: Tuner, job_id: str) -> messages.TrialList:
    trials = [messages.Trial.model_validate(trial) for trial in tuner.trials(job_id)]
    return messages.TrialList(trials=trials)


def observation(trial: int, found: Observation) -> messages.Observation:
    return messages.Observation(
        trial=trial, step=found.step, seconds=found.values, compute_seconds=found.compute
    )


def observation_list(
    tuner: Tuner, job_id: str, trial: int | None = None
) -> messages.ObservationList:
    return messages.ObservationList(
        observations=[
            observation(index, found) for index, found in tuner.store.observations(job_id, trial)
        ]
    )


def profile_list(tuner: Tuner, job_id: str, trial: int | None = None) -> messages.ProfileList:
    return messages.ProfileList(
        profiles=[
            reports.TrialProfile(trial=index, **dict(found))
            for index, found in tuner.store.profiles(job_id, trial)
        ]
    )


def event_list(tuner: Tuner, job_id: str) -> messages.EventList:
    events = tuner.store.events(job_id)
    return messages.EventList(events=[messages.Event.model_validate(event) for event in events])

"""``/api/v2``: jobs at a glance, for views that are looked at while a job runs; and downloads."""

from __future__ import annotations

from flask import Blueprint, Response

from bagua_autotune.api import pages, views
from bagua_autotune.api.answers import answer_if_changed, download
from bagua_autotune.api.export import job_json, trials_csv
from bagua_autotune.overview import Overviews


def add_routes(api: Blueprint, overviews: Overviews) -> None:
    """Add them to the blueprint; all that they change is that jobs whose lease ran out are lost."""
    tuner = overviews.tuner

    @api.get("/jobs")
    def get_jobs() -> Response:
        tuner.leases.look()
        return answer_if_changed(pages.job_list(overviews))

    @api.get("/jobs/<job_id>/overview")
    def get_overview(job_id: str) -> Response:
        return answer_if_changed(views.job_overview(overviews, job_id))

    @api.get("/jobs/<job_id>/curve")
    def get_curve(job_id: str) -> Response:
        return answer_if_changed(views.job_curve(overviews, job_id))

    @api.get("/jobs/<job_id>/buckets")
    def get_buckets(job_id: str) -> Response:
        return answer_if_changed(views.job_buckets(overviews, job_id))

    @api.get("/jobs/<job_id>/trials.csv")
    def get_trials_csv(job_id: str) -> Response:
        job, trials = tuner.store.job(job_id), views.trial_list(tuner, job_id).trials
        text = trials_csv(job.space, trials)
        return download(text, "text/csv; charset=utf-8", job.name, "-trials.csv")

    @api.get("/jobs/<job_id>/export.json")
    def get_export_json(job_id: str) -> Response:
        job, trials = views.job_detail(tuner, job_id), views.trial_list(tuner, job_id).trials
        # Trial by trial: those of a large job would fill the memory.
        observations = (
            observation
            for trial in trials
            for observation in views.observation_list(tuner, job_id, trial.index).observations
        )
        parts = job_json(job, trials, observations, views.event_list(tuner, job_id).events)
        return download(parts, "application/json", job.name, ".json")

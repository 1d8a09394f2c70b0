"""``/api/v2``: reading jobs, and downloads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from flask import Blueprint, Response, abort, request
from pydantic import BaseModel

from bagua_autotune.api.admission import team_name
from bagua_autotune.api.errors import failure, query_number
from bagua_autotune.api.openapi import document
from bagua_autotune.model.job import LONGEST_NAME
from bagua_autotune.model.text import JOB_ID
from bagua_autotune.views.lists import (
    MOST_LISTED,
    WrongPage,
    event_list,
    every_event,
    every_observation,
    every_trial,
    job_json,
    observation_list,
    profile_list,
    trial_list,
    trials_csv,
)
from bagua_autotune.views.overviews import MOST_JOBS_LISTED, Overviews

JOBS_LISTED = 100
UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def add_routes(api: Blueprint, overviews: Overviews, look: Callable[[], None]) -> None:
    """Add the routes that change nothing to the blueprint.

    Args:
        look: marks the jobs whose lease ran out as lost, before jobs are listed.
    """
    _show_at_a_glance(api, overviews, look)
    _show_lists(api, overviews)
    _offer_downloads(api, overviews)


def _show_at_a_glance(api: Blueprint, overviews: Overviews, look: Callable[[], None]) -> None:
    @api.get("/jobs")
    def get_jobs() -> Response:
        limit = query_number("limit", 1, MOST_JOBS_LISTED) or JOBS_LISTED
        after, name = request.args.get("after"), request.args.get("name")
        if after is not None and not JOB_ID.fullmatch(after):
            abort(422, "after: must be a job's id, such as the next of an earlier answer.")
        if name is not None and not (name.isprintable() and len(name) <= LONGEST_NAME):
            abort(422, f"name: must be printable and of at most {LONGEST_NAME} characters.")
        look()
        return answer_if_changed(overviews.job_list(name, limit, after, team_name()))

    @api.get("/jobs/<job_id>/overview")
    def get_overview(job_id: str) -> Response:
        return answer_if_changed(overviews.overview(job_id))

    @api.get("/jobs/<job_id>/curve")
    def get_curve(job_id: str) -> Response:
        return answer_if_changed(overviews.curve(job_id))

    @api.get("/jobs/<job_id>/buckets")
    def get_buckets(job_id: str) -> Response:
        return answer_if_changed(overviews.buckets(job_id))

    @api.get("/openapi.json")
    def get_openapi() -> dict[str, object]:
        return document()


def _show_lists(api: Blueprint, overviews: Overviews) -> None:
    store = overviews.store

    @api.errorhandler(WrongPage)
    def _wrong_page(wrong: WrongPage) -> Response:
        return failure(422, str(wrong))

    @api.get("/jobs/<job_id>")
    def get_job(job_id: str) -> Response:
        return answer(overviews.detail(job_id))

    @api.get("/jobs/<job_id>/trials")
    def get_trials(job_id: str) -> Response:
        return answer(trial_list(store, job_id, *_page()))

    @api.get("/jobs/<job_id>/observations")
    def get_observations(job_id: str) -> Response:
        return answer(observation_list(store, job_id, _trial(), *_page()))

    @api.get("/jobs/<job_id>/profiles")
    def get_profiles(job_id: str) -> Response:
        return answer(profile_list(store, job_id, _trial()))

    @api.get("/jobs/<job_id>/events")
    def get_events(job_id: str) -> Response:
        return answer(event_list(store, job_id, *_page()))


def _offer_downloads(api: Blueprint, overviews: Overviews) -> None:
    store = overviews.store

    @api.get("/jobs/<job_id>/trials.csv")
    def get_trials_csv(job_id: str) -> Response:
        job = store.jobs.get(job_id)
        text = trials_csv(job.space, every_trial(store, job_id))
        return download(text, "text/csv; charset=utf-8", job.name, "-trials.csv")

    @api.get("/jobs/<job_id>/export.json")
    def get_export_json(job_id: str) -> Response:
        job, trials = overviews.detail(job_id), every_trial(store, job_id)
        observations = every_observation(store, job_id)
        parts = job_json(job, trials, observations, every_event(store, job_id))
        return download(parts, "application/json", job.name, ".json")


def _page() -> tuple[int, str | None]:
    """The page that the query asks for."""
    return query_number("limit", 1, MOST_LISTED) or MOST_LISTED, request.args.get("after")


def _trial() -> int | None:
    return query_number("trial", 0, 2**31 - 1)


def answer(message: BaseModel, status: int = 200) -> Response:
    """The message as JSON."""
    return Response(message.model_dump_json(), status, content_type="application/json")


def answer_if_changed(message: BaseModel) -> Response:
    """The message as JSON; 304 if the client already has this version (``If-None-Match``)."""
    response = answer(message)
    response.cache_control.no_cache = True
    response.add_etag()
    response.make_conditional(request)
    return response


def download(text: str | Iterator[str], content_type: str, job_name: str, ending: str) -> Response:
    """A download, named after the job; its parts are sent as they are made."""
    response = Response(text, content_type=content_type)
    name = UNSAFE.sub("-", job_name).strip("-.")[:80] or "job"
    response.headers.set("Content-Disposition", "attachment", filename=f"{name}{ending}")
    return response

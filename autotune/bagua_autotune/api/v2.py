"""``/api/v2``: jobs, trials, observations, profiles and events of this project's own client."""

from __future__ import annotations

import re

from flask import Blueprint, Response, abort, request
from pydantic import BaseModel

from bagua_autotune.api import messages, views
from bagua_autotune.api.openapi import document
from bagua_autotune.api.problems import parse
from bagua_autotune.model.job import Event, Observation
from bagua_autotune.store import JobConflict
from bagua_autotune.tuning.tuner import TrialNotNamed, Tuner, WrongStep

JOB_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def blueprint(tuner: Tuner) -> Blueprint:
    """The routes, answered by this tuner."""
    api = Blueprint("v2", __name__, url_prefix="/api/v2")
    _take_from_ranks(api, tuner)
    _show(api, tuner)
    return api


def _take_from_ranks(api: Blueprint, tuner: Tuner) -> None:
    """What a job's rank 0 sends; every answer is the job's state."""

    def _refuse_other_protocols(job_id: str) -> None:
        if tuner.store.job(job_id).protocol != "v2":
            abort(409, "The job is one of /api/v1, whose workers alone report to it.")

    @api.put("/jobs/<job_id>")
    def put_job(job_id: str) -> Response:
        if not JOB_ID.fullmatch(job_id):
            abort(422, "The job id must match [A-Za-z0-9_-]{1,64}.")
        spec = parse(messages.Registration)
        try:
            is_new = tuner.register(job_id, spec)
        except JobConflict as error:
            abort(409, f"{error}; choose another id.")
        return _answer(views.job_state(tuner, job_id), 201 if is_new else 200)

    @api.post("/jobs/<job_id>/observations")
    def post_observations(job_id: str) -> Response:
        _refuse_other_protocols(job_id)
        batch = parse(messages.Observations)
        observations = [
            Observation(step.step, step.seconds, step.compute_seconds) for step in batch.steps
        ]
        try:
            tuner.observe(job_id, batch.trial, observations)
        except WrongStep as error:
            abort(422, f"steps: {error}.")
        return _answer(views.job_state(tuner, job_id))

    @api.post("/jobs/<job_id>/profiles")
    def post_profile(job_id: str) -> Response:
        _refuse_other_protocols(job_id)
        found = parse(messages.TrialProfile)
        try:
            tuner.take_profile(job_id, found.trial, found.profile)
        except WrongStep as error:
            abort(422, f"{error}.")
        return _answer(views.job_state(tuner, job_id))

    @api.post("/jobs/<job_id>/events")
    def post_event(job_id: str) -> Response:
        _refuse_other_protocols(job_id)
        new = parse(messages.NewEvent)
        event = Event(new.kind, new.trial, new.step, new.message, new.seconds)
        try:
            tuner.take_event(job_id, event)
        except TrialNotNamed as error:
            abort(422, f"trial: {error}.")
        return _answer(views.job_state(tuner, job_id))


def _show(api: Blueprint, tuner: Tuner) -> None:
    """What can be looked at; changes nothing."""

    @api.get("/jobs")
    def get_jobs() -> Response:
        limit = _number("limit", 1, messages.MOST_JOBS_LISTED)
        return _answer(views.job_list(tuner, request.args.get("name"), limit or 100))

    @api.get("/jobs/<job_id>")
    def get_job(job_id: str) -> Response:
        return _answer(views.job_detail(tuner, job_id))

    @api.get("/jobs/<job_id>/trials")
    def get_trials(job_id: str) -> Response:
        return _answer(views.trial_list(tuner, job_id))

    @api.get("/jobs/<job_id>/observations")
    def get_observations(job_id: str) -> Response:
        return _answer(views.observation_list(tuner, job_id, _number("trial", 0, 2**31 - 1)))

    @api.get("/jobs/<job_id>/profiles")
    def get_profiles(job_id: str) -> Response:
        return _answer(views.profile_list(tuner, job_id, _number("trial", 0, 2**31 - 1)))

    @api.get("/jobs/<job_id>/events")
    def get_events(job_id: str) -> Response:
        return _answer(views.event_list(tuner, job_id))

    @api.get("/openapi.json")
    def get_openapi() -> dict[str, object]:
        return document()


def _answer(message: BaseModel, status: int = 200) -> Response:
    return Response(message.model_dump_json(), status, content_type="application/json")


def _number(name: str, low: int, high: int) -> int | None:
    """A whole number of the query string; aborts with 422 if it is none or out of range."""
    text = request.args.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,10}", text) or not low <= int(text) <= high:
        abort(422, f"{name}: must be a whole number from {low} to {high}.")
    return int(text)

"""``/api/v2``: jobs, trials, observations, profiles and events of this project's own client; and
downloads of them."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence

from flask import Blueprint, Response, abort, request
from pydantic import BaseModel

from bagua_autotune.api import reports
from bagua_autotune.api.admission import check_quota, team_name
from bagua_autotune.api.bodies import parse, parse_both
from bagua_autotune.api.errors import failure, query_flag, query_number
from bagua_autotune.api.openapi import document
from bagua_autotune.earlier.copies import Copy, adopt, copy_of
from bagua_autotune.model.job import LONGEST_NAME, RUNS, Event, Observation
from bagua_autotune.model.received import TrialProfile
from bagua_autotune.model.text import JOB_ID
from bagua_autotune.store import Store
from bagua_autotune.store.errors import JobConflict, JobLives
from bagua_autotune.store.maintenance import retention
from bagua_autotune.store.maintenance.retention import delete_training
from bagua_autotune.tuning.status import OF_RUNS, OtherProtocol, WrongStep
from bagua_autotune.tuning.tuner import TrialNotNamed, Tuner
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

logger = logging.getLogger(__name__)

MOST_TOLD = 20


def _check_job_id() -> None:
    if not JOB_ID.fullmatch((request.view_args or {}).get("job_id", "any")):
        abort(422, f"The job id must match {JOB_ID.pattern}.")


def blueprint(tuner: Tuner, overviews: Overviews) -> Blueprint:
    """The routes: reports go to the tuner, and reads are answered from the overviews."""
    api = Blueprint("v2", __name__, url_prefix="/api/v2")
    api.before_request(_check_job_id)
    _take_from_ranks(api, tuner)
    _exchange_copies(api, tuner)
    _delete(api, tuner.store)
    _show_at_a_glance(api, overviews, tuner.leases.look)
    _show_lists(api, overviews)
    _offer_downloads(api, overviews)
    return api


def _take_from_ranks(api: Blueprint, tuner: Tuner) -> None:
    """The requests of a job's rank 0; every answer is the job's state."""

    @api.errorhandler(OtherProtocol)
    def _other_protocol(error: OtherProtocol) -> Response:
        return failure(409, str(error))

    @api.put("/jobs/<job_id>")
    def put_job(job_id: str) -> Response:
        check_quota(tuner.store, job_id)
        spec = parse_both(reports.Outline, reports.Registration)
        if spec.team is not None:
            abort(422, "team: the token says whose job it is, not the registration.")
        spec = spec.model_copy(update={"team": team_name()})
        try:
            is_new = tuner.register(job_id, spec)
        except JobConflict as error:
            abort(409, f"{error}; choose another id.")
        return answer(tuner.ask(job_id), 201 if is_new else 200)

    @api.get("/jobs/<job_id>/state")
    def get_state(job_id: str) -> Response:
        return answer(tuner.ask(job_id))

    @api.post("/jobs/<job_id>/observations")
    def post_observations(job_id: str) -> Response:
        batch = parse(reports.Observations)
        observations = [
            Observation(step.step, step.seconds, step.compute_seconds, step.complexity)
            for step in batch.steps
        ]
        try:
            state = tuner.observe(job_id, batch.trial, observations, batch.memory)
        except WrongStep as error:
            abort(422, f"steps: {error}.")
        return answer(state)

    @api.post("/jobs/<job_id>/profiles")
    def post_profile(job_id: str) -> Response:
        found = parse(TrialProfile)
        try:
            tuner.take_profile(job_id, found.trial, found.profile)
        except WrongStep as error:
            abort(422, f"{error}.")
        return answer(tuner.ask(job_id))

    @api.post("/jobs/<job_id>/progress")
    def post_progress(job_id: str) -> Response:
        told = parse(reports.ProgressReport)
        return answer(tuner.take_progress(job_id, told.step, told.seconds))

    @api.post("/jobs/<job_id>/events")
    def post_event(job_id: str) -> Response:
        new = parse(reports.NewEvent)
        event = Event(new.kind, new.trial, new.step, new.message, new.seconds)
        try:
            tuner.take_event(job_id, event, new.memory)
        except TrialNotNamed as error:
            abort(422, f"trial: {error}.")
        return answer(tuner.ask(job_id))


def _exchange_copies(api: Blueprint, tuner: Tuner) -> None:
    """Hand what is known of a training to the service of another host, and take it over."""

    @api.get("/jobs/<job_id>/copy")
    def get_copy(job_id: str) -> Response:
        if tuner.store.jobs.get(job_id).protocol in RUNS:
            raise OtherProtocol(OF_RUNS)
        return answer(copy_of(tuner.store, tuner.knowledge, job_id))

    @api.post("/copies")
    def post_copy() -> Response:
        copy = parse_both(reports.CopyOutline, Copy)
        adopted = adopt(tuner.store, copy, time.time())
        return answer(reports.Adopted(jobs=adopted))


def _delete(api: Blueprint, store: Store) -> None:
    @api.delete("/jobs/<job_id>")
    def delete_job(job_id: str) -> Response:
        try:
            deleted = delete_training(store, job_id, query_flag("force"))
        except JobLives as error:
            abort(
                409, f"{error} To force it, add ?force=true." if error.can_be_forced else f"{error}"
            )
        _audit("deleted", [job.id for job in deleted.jobs])
        return answer(deleted)

    @api.post("/prune")
    def post_prune() -> Response:
        asked = parse(reports.Prune)
        pruned = retention.prune_now(store, asked.older_than_days, asked.dry_run)
        if not asked.dry_run:
            _audit(f"pruned after {asked.older_than_days} days", [job.id for job in pruned.jobs])
        return answer(pruned)


def _audit(what: str, job_ids: Sequence[str]) -> None:
    """Log who asked for what cannot be undone."""
    shown = ", ".join(job_ids[:MOST_TOLD]) + (", ..." if len(job_ids) > MOST_TOLD else "")
    team = team_name()
    who = f"{request.remote_addr}, team {team}" if team else request.remote_addr
    logger.info("audit: %s: %d jobs (%s), by %s", what, len(job_ids), shown, who)


JOBS_LISTED = 100
UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def _show_at_a_glance(api: Blueprint, overviews: Overviews, look: Callable[[], None]) -> None:
    """``look`` marks the jobs whose lease ran out as lost, before jobs are listed."""

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

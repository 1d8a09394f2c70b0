"""``/api/v2``: jobs, trials, observations, profiles and events of this project's own client."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from flask import Blueprint, Response, abort, request

from bagua_autotune.api import reading, reports
from bagua_autotune.api.admission import check_quota, team_name
from bagua_autotune.api.bodies import parse, parse_both
from bagua_autotune.api.errors import failure, query_flag
from bagua_autotune.api.reading import answer
from bagua_autotune.earlier.copies import Copy, adopt, copy_of
from bagua_autotune.model.job import RUNS, Event, Observation
from bagua_autotune.model.received import TrialProfile
from bagua_autotune.model.text import JOB_ID
from bagua_autotune.store import Store
from bagua_autotune.store.errors import JobConflict, JobLives
from bagua_autotune.store.maintenance import retention
from bagua_autotune.store.maintenance.retention import delete_training
from bagua_autotune.tuning.status import OF_RUNS, OtherProtocol, WrongStep
from bagua_autotune.tuning.tuner import TrialNotNamed, Tuner
from bagua_autotune.views.overviews import Overviews

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
    reading.add_routes(api, overviews, tuner.leases.look)
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

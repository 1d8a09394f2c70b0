"""What a team's token may do: register, report, read and delete that team's jobs.

Another team's job is answered like one that does not exist, so that nobody finds out which there
are. What is about more than one job is for the service's own token.
"""

from __future__ import annotations

from contextlib import suppress

from flask import Flask, abort, g, request
from werkzeug.exceptions import TooManyRequests

from bagua_autotune.model.team import Team
from bagua_autotune.store import Store
from bagua_autotune.store.errors import UnknownJob

JOBS = "/api/v2/jobs"
JOB = f"{JOBS}/<job_id>"
# A copy also holds jobs that are alike.
OPERATORS_ONLY = ("/api/v2/prune", "/api/v2/copies", f"{JOB}/copy")
KNOWS_TEAMS = "/api/v2/"
RETRY_AFTER_SECONDS = 10


def team_of_request() -> Team | None:
    """The team whose token came with the request; None: it may reach all jobs."""
    return getattr(g, "team", None)


def team_name() -> str | None:
    team = team_of_request()
    return team.name if team else None


def install(app: Flask, store: Store) -> None:
    """Check each request with a team's token, after admission has."""

    @app.before_request
    def _check() -> None:
        team = team_of_request()
        if team is None or request.url_rule is None:
            return
        rule = request.url_rule.rule
        if not rule.startswith(KNOWS_TEAMS):
            abort(403, "This protocol knows no teams: use the service's own token.")
        if rule in OPERATORS_ONLY:
            abort(403, "This is not for teams: use the service's own token.")
        # A list goes on after a job, which has to be one of the team's, too.
        after = request.args.get("after") if rule == JOBS else None
        job_id = (request.view_args or {}).get("job_id", after)
        # A new job is nobody's yet; that of another team has other content, which is a conflict.
        if job_id is None or (rule, request.method) == (JOB, "PUT"):
            return
        if store.jobs.get(job_id).team != team.name:
            raise UnknownJob(job_id)


def check_quota(store: Store, job_id: str) -> None:
    """Abort with 429 if this job, registered or resumed, would be one too many of the team's.

    Jobs that are registered at the same moment may all be the last one that there is room for.
    """
    team = team_of_request()
    if team is None or team.most_jobs is None:
        return
    with suppress(UnknownJob):
        known = store.jobs.get(job_id)
        if known.ended_at is None and known.team == team.name:
            return  # it is counted already
    if store.jobs.count_running().get(team.name, 0) >= team.most_jobs:
        raise TooManyRequests(
            f"The team {team.name} has as many jobs that have not ended as it may have "
            f"({team.most_jobs}): end or delete one, or ask whoever runs the service for more. "
            "This one is tuned as soon as there is room.",
            retry_after=RETRY_AFTER_SECONDS,
        )

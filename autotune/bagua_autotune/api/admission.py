"""Admission: who has the token, if one is set, may use the service, and never a page of another
site.

Any page can make a browser send requests, also to a service that only this machine can reach. Three
things give such a request away: the browser names the page's site; the Host header has a name that
somebody made point to this machine (DNS rebinding); or the body is not declared as JSON, which a
page cannot send to another site unasked.

With a team's token one may register, report, read and delete that team's jobs. Another team's job
is answered like one that does not exist, so that nobody finds out which there are. What is about
more than one job is for the service's own token.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from flask import Flask, Response, abort, g, request
from pydantic import SecretStr
from werkzeug.exceptions import HTTPException, TooManyRequests

from bagua_autotune.api import bodies
from bagua_autotune.settings import Settings, Team, digest_of, host_name
from bagua_autotune.store import Store
from bagua_autotune.store.errors import UnknownJob

logger = logging.getLogger(__name__)

GUARDED = "/api/"
BEARER = b"Bearer "
OWN_PAGE = ("same-origin", "none")  # none: a typed address, or a bookmark
LONGEST_SHOWN = 100
# Of refusals, between two lines. Of so many addresses the count is kept, and so many are named.
TOLD_SECONDS = 60.0
MOST_ADDRESSES = 1000
MOST_NAMED = 5
OTHERS = "further addresses"
# Between two lines that the previous token is still used.
QUIET_SECONDS = 3600.0


def install(app: Flask, settings: Settings) -> None:
    """Check every request of the app first."""
    # On a network the token is enough, and the service may have any name.
    names = _names(settings) if settings.is_loopback or not settings.token else None
    tokens = [token for token in (settings.token, settings.previous_token) if token]
    previous, refusals = _PreviousToken(), Refusals()

    @app.after_request
    def _count(response: Response) -> Response:
        if response.status_code == HTTPStatus.UNAUTHORIZED:
            refusals.count(request.remote_addr or "?")
        return response

    @app.before_request
    def _check() -> None:
        if names is not None:
            _check_host(names, settings.is_loopback)
        _refuse_other_sites()
        bodies.check_length()
        if not request.path.startswith(GUARDED):
            return
        if tokens:
            g.team = _check_token(tokens, previous, settings.teams)
        is_taken = request.url_rule and request.method in ("POST", "PUT")
        if is_taken and request.mimetype != "application/json":
            abort(415, "The body must be JSON, sent with Content-Type: application/json.")

    app.extensions[__name__] = _check


def takes_body(app: Flask, environ: dict[str, Any]) -> bool:
    """Whether the request may send its body, judged by its headers alone."""
    with app.request_context(environ):
        try:
            app.extensions[__name__]()
        except HTTPException:
            return False
    return True


def _names(settings: Settings) -> Collection[str]:
    machine = [socket.gethostname()]
    if not settings.is_loopback:
        machine.append(socket.getfqdn())  # may take a DNS request
    return {host_name(name) for name in (settings.host, *machine, *settings.allowed_hosts)}


def _check_host(names: Collection[str], is_loopback: bool) -> None:
    host = request.headers.get("Host")
    if host is None:
        return  # not a browser: they always send it
    name = host_name(host)
    # No page of another site has a bare address as its name, or a name of this machine.
    if name in names or _is_address(name) or f".{name}".endswith(".localhost"):
        return
    if name and not is_loopback and "." not in name:
        return  # a container or Kubernetes service; no web page has a name without a dot
    shown = name[:LONGEST_SHOWN]
    abort(
        403,
        f"This service does not answer to the name {shown!r}. If that is its name, start it with "
        f"--allowed-host {shown} or BAGUA_AUTOTUNE_ALLOWED_HOSTS.",
    )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _refuse_other_sites() -> None:
    site = request.headers.get("Sec-Fetch-Site")
    if site is None:
        # Over plain HTTP browsers send only the origin. Behind a proxy its scheme may differ.
        origin = request.headers.get("Origin")
        is_own = origin is None or _host_of(origin) == request.headers.get("Host")
    else:
        is_own = site in OWN_PAGE or _is_followed_link()
    if not is_own:
        abort(403, "A page of another site must not use this service.")


def _host_of(origin: str) -> str | None:
    """The host and port of an origin; None: it is no address."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _is_followed_link() -> bool:
    """Whether somebody followed a link of another site, which sees nothing of our answer."""
    headers = request.headers
    is_whole_page = (headers.get("Sec-Fetch-Mode"), headers.get("Sec-Fetch-Dest")) == (
        "navigate",
        "document",
    )
    return is_whole_page and request.method in ("GET", "HEAD")


class Refusals:
    """Requests whose token is refused: logs the first at once, and then once in a while how many
    there were since, and from where.

    Args:
        quiet_seconds: between two lines.
    """

    def __init__(self, quiet_seconds: float = TOLD_SECONDS) -> None:
        self._quiet_seconds = quiet_seconds
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._is_quiet = False

    def count(self, address: str) -> None:
        """Count a refusal of a request from this address."""
        with self._lock:
            if address not in self._counts and len(self._counts) >= MOST_ADDRESSES:
                address = OTHERS
            self._counts[address] += 1
            if not self._is_quiet:
                self._tell()

    def _after_a_while(self) -> None:
        with self._lock:
            self._is_quiet = False
            if self._counts:
                self._tell()

    def _tell(self) -> None:
        named = self._counts.most_common(MOST_NAMED)
        rest = self._counts.total() - sum(count for _, count in named)
        told = [f"{count} from {address}" for address, count in named]
        told += [f"{rest} from others"] if rest else []
        logger.warning(
            "refused requests without a token that this service takes: %s", ", ".join(told)
        )
        self._counts.clear()
        self._is_quiet = True
        later = threading.Timer(self._quiet_seconds, self._after_a_while)
        later.daemon = True
        later.start()


class _PreviousToken:
    """Logs now and then that the previous token is still used: it can be removed when
    that stops.
    """

    def __init__(self) -> None:
        self._silent_until = -math.inf

    def used(self) -> None:
        now = time.monotonic()
        if now >= self._silent_until:
            self._silent_until = now + QUIET_SECONDS
            logger.info(
                "BAGUA_AUTOTUNE_PREVIOUS_TOKEN is still used: %s %s, from %s",
                *(request.method, request.path, request.remote_addr),
            )


def _check_token(
    tokens: Sequence[SecretStr], previous: _PreviousToken, teams: Sequence[Team]
) -> Team | None:
    """The team whose token it is; None: it is the service's own. Aborts with 401 if it is neither.
    Each is compared in constant time."""
    # WSGI decodes headers as latin-1.
    given = request.headers.get("Authorization", "").encode("latin-1", "replace")
    expected = [BEARER + token.get_secret_value().encode() for token in tokens]
    is_one = [hmac.compare_digest(given, each) for each in expected]
    if any(is_one[1:]) and not is_one[0]:
        previous.used()
    digest = digest_of(given.removeprefix(BEARER))
    known = teams if given.startswith(BEARER) else ()
    found = [team for team in known if hmac.compare_digest(digest, team.digest)]
    if not any(is_one) and not found:
        or_teams = ", or a team's token" if teams else ""
        abort(
            401,
            "This service needs the header Authorization: Bearer TOKEN, where TOKEN is its "
            f"BAGUA_AUTOTUNE_TOKEN{or_teams}.",
        )
    return None if any(is_one) else found[0]


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


def install_teams(app: Flask, store: Store) -> None:
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

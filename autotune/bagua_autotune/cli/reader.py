"""Where the commands find jobs: in a running service, or in its database."""

from __future__ import annotations

import http.client
import json
import logging
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import click
from pydantic import BaseModel, ValidationError
from sqlalchemy.exc import SQLAlchemyError

from bagua_autotune import __version__
from bagua_autotune.model.job import Event
from bagua_autotune.model.received import TrialProfile
from bagua_autotune.model.text import JOB_ID, clean
from bagua_autotune.settings import ENVIRONMENT
from bagua_autotune.store import Store
from bagua_autotune.store.engine.location import default_url
from bagua_autotune.store.errors import JobLives, NoDatabase, StoreError, UnknownJob
from bagua_autotune.store.maintenance import retention
from bagua_autotune.store.maintenance.retention import Deleted, Pruned, forget_copies
from bagua_autotune.views.lists import (
    EventList,
    JobDetail,
    ObservationList,
    ObservationView,
    Page,
    ProfileList,
    TrialList,
    TrialView,
    all_pages,
    every_event,
    every_observation,
    every_trial,
    profile_list,
)
from bagua_autotune.views.overviews import JobList, JobOverview, Overviews
from bagua_autotune.views.summary import JobSummary

Command = TypeVar("Command", bound=Callable[..., Any])
NO_JOBS = "No jobs yet: start a training with BAGUA_AUTOTUNE=1"


class NoJobsYet(click.ClickException):
    """The service has never run here: its own database is not there."""


@contextmanager
def store_errors_told() -> Iterator[None]:
    """Turn a database's failure into a ClickException; it may work again later."""
    try:
        yield
    except SQLAlchemyError as error:
        reason = clean(str(getattr(error, "orig", None) or error))
        raise click.ClickException(f"the database cannot be used: {reason}") from error


class DatabaseReader:
    """Reads the database itself; no service has to run."""

    def __init__(self, url: str | None) -> None:
        self._store = open_store(url)
        self._overviews = Overviews(self._store)

    @store_errors_told()
    def jobs(self, name: str | None = None, limit: int = 1) -> list[JobSummary]:
        return self._overviews.job_list(name, limit).jobs

    @store_errors_told()
    def overview(self, job_id: str) -> JobOverview:
        return self._overviews.overview(job_id)

    @store_errors_told()
    def job(self, job_id: str) -> JobDetail:
        return self._overviews.detail(job_id)

    @store_errors_told()
    def trials(self, job_id: str) -> list[TrialView]:
        return every_trial(self._store, job_id)

    @store_errors_told()
    def observations(self, job_id: str) -> list[ObservationView]:
        return list(every_observation(self._store, job_id))

    @store_errors_told()
    def profiles(self, job_id: str) -> list[TrialProfile]:
        return profile_list(self._store, job_id).profiles

    @store_errors_told()
    def events(self, job_id: str) -> list[Event]:
        return every_event(self._store, job_id)

    @store_errors_told()
    def delete(self, job_id: str, force: bool) -> retention.Deleted:
        try:
            return retention.delete_training(self._store, job_id, force)
        except JobLives as error:
            raise click.ClickException(f"{error}") from error

    @store_errors_told()
    def prune(self, days: int, dry_run: bool) -> retention.Pruned:
        return retention.prune_now(self._store, days, dry_run)


Message = TypeVar("Message", bound=BaseModel)
JSON = {"Content-Type": "application/json"}
AnyPage = TypeVar("AnyPage", bound=Page)
TIMEOUT_SECONDS = 30.0
PRUNE_TIMEOUT_SECONDS = 600.0
"""Longest time to delete jobs: thousands of them go piece by piece."""


class OtherRelease(click.ClickException):
    """The service is of another release than this command."""


class ServiceReader:
    """Reads a running service through ``/api/v2``.

    Args:
        url: of the service; one without ``http://`` or ``https://`` is taken as http.
        token: the service's, if it has one.
    """

    def __init__(self, url: str, token: str | None) -> None:
        self._url = (url if "://" in url else f"http://{url}").rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def jobs(self, name: str | None = None, limit: int = 1) -> list[JobSummary]:
        query = {"limit": str(limit)} | ({} if name is None else {"name": name})
        try:
            return self._get(JobList, "/jobs?" + urllib.parse.urlencode(query)).jobs
        except UnknownJob as error:
            raise self._other_release() from error

    def job(self, job_id: str) -> JobDetail:
        return self._get(JobDetail, self._path(job_id))

    def overview(self, job_id: str) -> JobOverview:
        path = self._path(job_id)
        with suppress(UnknownJob):
            return self._get(JobOverview, path + "/overview")
        self._ask(path)
        try:
            # The job is known: it is a moment old, or the service has no overviews.
            return self._get(JobOverview, path + "/overview")
        except UnknownJob as error:
            raise self._other_release() from error

    def trials(self, job_id: str) -> list[TrialView]:
        pages = self._pages(TrialList, self._path(job_id) + "/trials")
        return [trial for page in pages for trial in page.trials]

    def observations(self, job_id: str) -> list[ObservationView]:
        pages = self._pages(ObservationList, self._path(job_id) + "/observations")
        return [observation for page in pages for observation in page.observations]

    def profiles(self, job_id: str) -> list[TrialProfile]:
        return self._get(ProfileList, self._path(job_id) + "/profiles").profiles

    def events(self, job_id: str) -> list[Event]:
        pages = self._pages(EventList, self._path(job_id) + "/events")
        return [event for page in pages for event in page.events]

    def delete(self, job_id: str, force: bool) -> Deleted:
        path = self._path(job_id) + ("?force=true" if force else "")
        answer = self._ask(path, timeout_seconds=PRUNE_TIMEOUT_SECONDS, method="DELETE")
        deleted = self._read(Deleted, answer)
        forget_copies([job.id for job in deleted.jobs])  # those of this host
        return deleted

    def prune(self, days: int, dry_run: bool) -> Pruned:
        asked = json.dumps({"older_than_days": days, "dry_run": dry_run}).encode()
        try:
            pruned = self._get(Pruned, "/prune", asked, PRUNE_TIMEOUT_SECONDS)
        except UnknownJob as error:
            raise self._other_release() from error
        forget_copies([] if dry_run else [job.id for job in pruned.jobs])
        return pruned

    def _path(self, job_id: str) -> str:
        return "/jobs/" + urllib.parse.quote(job_id, safe="")

    def _pages(self, message: type[AnyPage], path: str) -> Iterator[AnyPage]:
        """All pages of a list."""

        def read(after: str | None) -> AnyPage:
            query = "" if after is None else "?" + urllib.parse.urlencode({"after": after})
            return self._get(message, path + query)

        return all_pages(read)

    def _get(
        self,
        message: type[Message],
        path: str,
        body: bytes | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> Message:
        return self._read(message, self._ask(path, body, timeout_seconds))

    def _read(self, message: type[Message], answer: bytes) -> Message:
        try:
            return message.model_validate_json(answer)
        except ValidationError as error:
            if error.errors()[0]["type"] == "json_invalid":
                text = f"{self._url} cannot be read: its answer is not JSON"
                raise click.ClickException(text) from error
            raise self._other_release() from error

    def _ask(
        self,
        path: str,
        body: bytes | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        method: str | None = None,
    ) -> bytes:
        """Ask the service: GET, or POST of a JSON body, unless another method is named."""
        headers = self._headers if body is None else {**self._headers, **JSON}
        try:
            request = urllib.request.Request(
                self._url + "/api/v2" + path, body, headers, method=method
            )
            with urllib.request.urlopen(request, timeout=timeout_seconds) as response:
                return bytes(response.read())
        except urllib.error.HTTPError as error:
            if error.code == 404:
                raise UnknownJob(path) from error
            detail = self._wrong_token if error.code == 401 else _detail(error)
            raise click.ClickException(f"{self._url} answered {error.code}: {detail}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            # Some errors have no message.
            reason = getattr(error, "reason", None) or str(error) or type(error).__name__
            raise click.ClickException(f"{self._url} cannot be read: {reason}") from error

    @property
    def _wrong_token(self) -> str:
        wrong = "it does not accept this token" if self._headers else "it needs a token"
        return f"{wrong}; set BAGUA_AUTOTUNE_TOKEN to that of the service"

    def _other_release(self) -> OtherRelease:
        try:
            version = clean(str(json.loads(self._ask("/openapi.json"))["info"]["version"]))
        except (click.ClickException, UnknownJob, ValueError, KeyError, TypeError):
            ours = f"this command's release, {__version__}"
            return OtherRelease(f"what answers at {self._url} is not a service of {ours}")
        versions = f"its version is {version}, this one's {__version__}"
        if version == __version__:
            versions = f"both say that they are {version}"
        return OtherRelease(
            f"the service at {self._url} is of another release than this command ({versions}); "
            "use the same release of both"
        )


def _detail(error: urllib.error.HTTPError) -> str:
    try:
        return clean(str(json.loads(error.read())["detail"]))
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return error.reason


Reader = DatabaseReader | ServiceReader
"""Raises UnknownJob, or ClickException where nothing can be read."""


def source_options(command: Command) -> Command:
    """The options that say where the jobs are; see open_reader."""
    command = click.option(
        "--url",
        envvar="BAGUA_AUTOTUNE_URL",
        help="Ask the service at this address.  [default: BAGUA_AUTOTUNE_URL]",
    )(command)
    return click.option(
        "--database",
        metavar="URL",
        help="Use this database and no service.  [default: the one that serve uses]",
    )(command)


def database_url(url: str | None) -> str:
    """Return this URL, or else that of the database that ``serve`` uses."""
    return url or os.environ.get(ENVIRONMENT["database"]) or default_url()


def open_store(url: str | None) -> Store:
    """An existing database, by default that of serve.

    Raises:
        NoJobsYet: none is named, and serve's is not there.
        click.ClickException: it cannot be used.
    """
    # It would print that it could not close a lost connection.
    logging.getLogger("sqlalchemy.pool").addHandler(logging.NullHandler())
    try:
        return Store(database_url(url), as_found=True)
    except NoDatabase as error:
        if url is None:
            raise NoJobsYet(f"{NO_JOBS} ({error})") from error
        raise click.ClickException(str(error)) from error
    except StoreError as error:
        raise click.ClickException(str(error)) from error


def open_reader(database: str | None, url: str | None) -> Reader:
    """A service if one is named and no database is, else a database."""
    if url and not database:
        return ServiceReader(url, os.environ.get("BAGUA_AUTOTUNE_TOKEN"))
    return DatabaseReader(database)


def find_job(reader: Reader, job: str) -> JobOverview:
    """The job of this id, or else the newest of this name; ClickException if there is none."""
    if JOB_ID.fullmatch(job):
        with suppress(UnknownJob):
            return reader.overview(job)
    with suppress(UnknownJob):  # deleted since it was listed
        for named in reader.jobs(job):
            return reader.overview(named.id)
    raise no_such_job(job)


def no_jobs(database: str | None, url: str | None) -> str:
    """What to do where there are none yet; see open_reader."""
    return f"{NO_JOBS} BAGUA_AUTOTUNE_URL={url}" if url and not database else NO_JOBS


def no_such_job(job: str) -> click.ClickException:
    return click.ClickException(f"there is no job {job!r}; 'bagua-autotune jobs' lists all")

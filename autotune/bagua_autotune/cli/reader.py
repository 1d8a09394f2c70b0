"""Where the commands read jobs from: a running service, or its database."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import click
from pydantic import BaseModel, ValidationError

from bagua_autotune.api import messages, views
from bagua_autotune.model.text import clean
from bagua_autotune.overview import Overviews
from bagua_autotune.settings import ENVIRONMENT
from bagua_autotune.store import Store, StoreError, UnknownJob
from bagua_autotune.store.database import default_url
from bagua_autotune.tuning.tuner import Tuner

Message = TypeVar("Message", bound=BaseModel)
Command = TypeVar("Command", bound=Callable[..., Any])
TIMEOUT_SECONDS = 30.0


class Reader(Protocol):
    """Reads jobs; raises UnknownJob, or ClickException where nothing can be read."""

    def jobs(self, name: str | None = None, limit: int = 1) -> list[messages.JobSummary]: ...

    def job(self, job_id: str) -> messages.JobDetail: ...

    def overview(self, job_id: str) -> messages.JobOverview: ...

    def trials(self, job_id: str) -> list[messages.Trial]: ...

    def observations(self, job_id: str) -> list[messages.Observation]: ...

    def profiles(self, job_id: str) -> list[messages.TrialProfile]: ...

    def events(self, job_id: str) -> list[messages.Event]: ...


class DatabaseReader:
    """Reads the database itself; no service need run."""

    def __init__(self, url: str | None) -> None:
        self._tuner = Tuner(open_store(url))
        self._overviews = Overviews(self._tuner)

    def jobs(self, name: str | None = None, limit: int = 1) -> list[messages.JobSummary]:
        return views.job_list(self._overviews, name, limit).jobs

    def overview(self, job_id: str) -> messages.JobOverview:
        return views.job_overview(self._overviews, job_id)

    def job(self, job_id: str) -> messages.JobDetail:
        return views.job_detail(self._tuner, job_id)

    def trials(self, job_id: str) -> list[messages.Trial]:
        return views.trial_list(self._tuner, job_id).trials

    def observations(self, job_id: str) -> list[messages.Observation]:
        return views.observation_list(self._tuner, job_id).observations

    def profiles(self, job_id: str) -> list[messages.TrialProfile]:
        return views.profile_list(self._tuner, job_id).profiles

    def events(self, job_id: str) -> list[messages.Event]:
        return views.event_list(self._tuner, job_id).events


class ServiceReader:
    """Asks a running service through ``/api/v2``."""

    def __init__(self, url: str, token: str | None) -> None:
        self._url = url.rstrip("/") + "/api/v2/jobs"
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def jobs(self, name: str | None = None, limit: int = 1) -> list[messages.JobSummary]:
        query = {"limit": str(limit)} | ({} if name is None else {"name": name})
        return self._get(messages.JobList, "?" + urllib.parse.urlencode(query)).jobs

    def job(self, job_id: str) -> messages.JobDetail:
        return self._get(messages.JobDetail, self._path(job_id))

    def overview(self, job_id: str) -> messages.JobOverview:
        return self._get(messages.JobOverview, self._path(job_id) + "/overview")

    def trials(self, job_id: str) -> list[messages.Trial]:
        return self._get(messages.TrialList, self._path(job_id) + "/trials").trials

    def observations(self, job_id: str) -> list[messages.Observation]:
        path = self._path(job_id) + "/observations"
        return self._get(messages.ObservationList, path).observations

    def profiles(self, job_id: str) -> list[messages.TrialProfile]:
        return self._get(messages.ProfileList, self._path(job_id) + "/profiles").profiles

    def events(self, job_id: str) -> list[messages.Event]:
        return self._get(messages.EventList, self._path(job_id) + "/events").events

    def _path(self, job_id: str) -> str:
        return "/" + urllib.parse.quote(job_id, safe="")

    def _get(self, message: type[Message], path: str) -> Message:
        try:
            request = urllib.request.Request(self._url + path, headers=self._headers)
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
                return message.model_validate_json(response.read())
        except urllib.error.HTTPError as error:
            if error.code == 404:
                raise UnknownJob(path) from error
            detail = _detail(error)
            raise click.ClickException(f"{self._url} answered {error.code}: {detail}") from error
        except (OSError, ValueError, ValidationError) as error:
            reason = getattr(error, "reason", None) or error
            raise click.ClickException(f"{self._url} cannot be read: {reason}") from error


def source_options(command: Command) -> Command:
    """The options that say where to read; see open_reader."""
    command = click.option("--url", envvar="BAGUA_AUTOTUNE_URL", help="Ask this service.")(command)
    return click.option(
        "--database", metavar="URL", help="Read this database, no service.  [default: serve's]"
    )(command)


def open_store(url: str | None) -> Store:
    """An existing database, by default that of serve; ClickException if it cannot be used."""
    try:
        url = url or os.environ.get(ENVIRONMENT["database"]) or default_url()
        return Store(url, as_found=True)
    except StoreError as error:
        raise click.ClickException(str(error)) from error


def open_reader(database: str | None, url: str | None) -> Reader:
    """A service if one is named, unless a database is."""
    if url and not database:
        return ServiceReader(url, os.environ.get("BAGUA_AUTOTUNE_TOKEN"))
    return DatabaseReader(database)


def find_job(reader: Reader, job: str) -> messages.JobDetail:
    """The job of this id, or else the newest of this name; ClickException if there is none."""
    try:
        return reader.job(job)
    except UnknownJob:
        named = reader.jobs(job)
    if not named:
        raise click.ClickException(
            f"there is no job {job!r}; 'bagua-autotune jobs' lists those there are"
        )
    return reader.job(named[0].id)


def _detail(error: urllib.error.HTTPError) -> str:
    try:
        return clean(str(json.loads(error.read())["detail"]))
    except (OSError, ValueError, KeyError, TypeError):
        return error.reason

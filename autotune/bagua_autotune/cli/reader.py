"""Where the commands find jobs: in a running service, or in its database."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

import click
from sqlalchemy.exc import SQLAlchemyError

from bagua_autotune import views
from bagua_autotune.cli.service_reader import ServiceReader
from bagua_autotune.model.characters import JOB_ID, clean
from bagua_autotune.settings import ENVIRONMENT
from bagua_autotune.store import Store
from bagua_autotune.store.engine.location import default_url
from bagua_autotune.store.errors import JobLives, NoDatabase, StoreError, UnknownJob
from bagua_autotune.store.maintenance import retention

Command = TypeVar("Command", bound=Callable[..., Any])
NO_JOBS = "No jobs yet: start a training with BAGUA_AUTOTUNE=1"


class NoJobsYet(click.ClickException):
    """The service has never run here: its own database is not there."""


class Reader(Protocol):
    """Raises UnknownJob, or ClickException where nothing can be read."""

    def jobs(self, name: str | None = None, limit: int = 1) -> list[views.JobSummary]: ...

    def job(self, job_id: str) -> views.JobDetail: ...

    def overview(self, job_id: str) -> views.JobOverview: ...

    def trials(self, job_id: str) -> list[views.TrialView]: ...

    def observations(self, job_id: str) -> list[views.ObservationView]: ...

    def profiles(self, job_id: str) -> list[views.TrialProfile]: ...

    def events(self, job_id: str) -> list[views.Event]: ...

    def delete(self, job_id: str, force: bool) -> retention.Deleted: ...

    def prune(self, days: int, dry_run: bool) -> retention.Pruned: ...


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
        self._overviews = views.Overviews(self._store)

    @store_errors_told()
    def jobs(self, name: str | None = None, limit: int = 1) -> list[views.JobSummary]:
        return self._overviews.job_list(name, limit).jobs

    @store_errors_told()
    def overview(self, job_id: str) -> views.JobOverview:
        return self._overviews.overview(job_id)

    @store_errors_told()
    def job(self, job_id: str) -> views.JobDetail:
        return self._overviews.detail(job_id)

    @store_errors_told()
    def trials(self, job_id: str) -> list[views.TrialView]:
        return views.every_trial(self._store, job_id)

    @store_errors_told()
    def observations(self, job_id: str) -> list[views.ObservationView]:
        return list(views.every_observation(self._store, job_id))

    @store_errors_told()
    def profiles(self, job_id: str) -> list[views.TrialProfile]:
        return views.profile_list(self._store, job_id).profiles

    @store_errors_told()
    def events(self, job_id: str) -> list[views.Event]:
        return views.every_event(self._store, job_id)

    @store_errors_told()
    def delete(self, job_id: str, force: bool) -> retention.Deleted:
        try:
            return retention.delete_training(self._store, job_id, force)
        except JobLives as error:
            raise click.ClickException(f"{error}") from error

    @store_errors_told()
    def prune(self, days: int, dry_run: bool) -> retention.Pruned:
        return retention.prune_now(self._store, days, dry_run)


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


def find_job(reader: Reader, job: str) -> views.JobOverview:
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

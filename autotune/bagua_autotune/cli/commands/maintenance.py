"""``bagua-autotune backup``, ``restore``, ``doctor``, ``delete`` and ``prune``: copy and check the
database; delete one job, everything, or old jobs."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import click

from bagua_autotune.cli.output import print_table, say, say_beside
from bagua_autotune.cli.reader import (
    NO_JOBS,
    NoJobsYet,
    Reader,
    database_url,
    no_such_job,
    open_reader,
    open_store,
    source_options,
)
from bagua_autotune.model.text import JOB_ID, describe_count
from bagua_autotune.settings import ENVIRONMENT
from bagua_autotune.store.engine.location import default_urls
from bagua_autotune.store.errors import StoreError, UnknownJob
from bagua_autotune.store.maintenance import backups, checkup
from bagua_autotune.store.maintenance.retention import Deleted, DeletedJob


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--database", metavar="URL", help="Copy this database.  [default: the one that serve uses]"
)
def backup(file: Path, database: str | None) -> None:
    """Copy the SQLite database to FILE, also while a service uses it."""
    try:
        backups.backup(database_url(database), file)
    except StoreError as error:
        raise click.ClickException(str(error)) from error
    say(f"copied to {file}; use it with --database sqlite:///{file.absolute()}")


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--database", metavar="URL", help="Replace this database.  [default: the one that serve uses]"
)
def restore(file: Path, database: str | None) -> None:
    """Put FILE, a copy that backup made, in the place of the SQLite database.

    What the database holds is lost: if it can still be read, copy it first. A database that a
    service uses is not touched. With it goes what a killed service left beside it, which SQLite
    would otherwise write over the copy.
    """
    url = database_url(database)
    try:
        restored = backups.restore(url, file)
    except StoreError as error:
        raise click.ClickException(str(error)) from error
    newest = restored.last_contact_at
    until = "" if newest is None else f", the last report of {datetime.fromtimestamp(newest):%F %T}"
    say(f"restored {file}: {describe_count(restored.jobs, 'job')}{until}; start the service again")


@click.command()
@click.option(
    "--database", metavar="URL", help="Check this database.  [default: the one that serve uses]"
)
def doctor(database: str | None) -> None:
    """Check the database: one line for each check; exit status 1 if one finds a fault."""
    faults = 0
    for finding in checkup.examine(open_store(database)):
        faults += finding.is_fault
        rest = f". What to do: {finding.remedy}" if finding.is_fault else ""
        say(f"{'FAULT' if finding.is_fault else 'ok'}: {finding.words}{rest}")
    if faults:
        raise click.ClickException(f"{describe_count(faults, 'fault')} found")


DELETED = ("job", "name", "state", "last contact")


def row_of(job: DeletedJob) -> tuple[str, str, str, str]:
    """A deleted job in DELETED."""
    return job.id, job.name, job.state, f"{datetime.fromtimestamp(job.last_contact_at):%F %T}"


@click.command()
@click.option(
    "--older-than",
    "days",
    type=click.IntRange(1, 36_500),
    required=True,
    metavar="DAYS",
    help="Delete the jobs that have not reported for so many days.",
)
@click.option("--dry-run", is_flag=True, help="List the jobs and delete none.")
@source_options
def prune(days: int, dry_run: bool, database: str | None, url: str | None) -> None:
    """Delete old jobs with all that is stored of them, and list them.

    A training that runs keeps reporting, so its job is never old. The service deletes old jobs by
    itself, too: see --keep-days of serve.
    """
    try:
        pruned = open_reader(database, url).prune(days, dry_run)
    except NoJobsYet:
        say_beside(NO_JOBS)
        return
    rows = [row_of(job) for job in pruned.jobs]
    print_table(DELETED, rows)
    if dry_run:
        jobs = f"{len(rows)} {'job' if len(rows) == 1 else 'jobs'}"
        say_beside(f"nothing is deleted: without --dry-run {jobs} would be")


@click.command()
@click.argument("job", required=False)
@click.option(
    "--everything",
    is_flag=True,
    help="Delete the database, and the copies that trainings keep on this host.",
)
@click.option(
    "--force",
    is_flag=True,
    help="Delete JOB even if its training may still run. The training goes on; while it is being "
    "tuned it registers again, and is tuned from its beginning. With --everything: do not ask.",
)
@source_options
@click.pass_context
def delete(
    context: click.Context,
    job: str | None,
    everything: bool,
    force: bool,
    database: str | None,
    url: str | None,
) -> None:
    """Delete JOB with all that is stored of it, and list what was deleted.

    A training that was started again is one job for each of its lives: all of them go, and with
    them the copies of it that are on this host.
    """
    if (job is None) != everything:
        raise click.UsageError("name either a JOB or --everything", context)
    if job is None:
        _delete_everything(database, url, force)
        return
    deleted = _delete(open_reader(database, url), job, force)
    print_table(DELETED, [row_of(each) for each in deleted.jobs])


def _delete_everything(database: str | None, url: str | None, force: bool) -> None:
    if url and not database:
        raise click.ClickException(
            f"--everything is not for a service ({url}): call it where the database is, and name "
            "that with --database"
        )
    given = database or os.environ.get(ENVIRONMENT["database"])
    urls = [given] if given else default_urls()
    try:
        found = backups.everything(urls)
        if not found:
            say_beside("nothing is stored here")
            return
        for each in found:
            say(each)
        if not force:
            click.confirm("Delete all of this for good?", abort=True, err=True)
        backups.delete_everything(urls)
    except StoreError as error:
        raise click.ClickException(str(error)) from error
    say_beside(
        "deleted; copies that `backup` made, files that a training was asked for, and copies on "
        "other nodes are not touched"
    )


def _delete(reader: Reader, job: str, force: bool) -> Deleted:
    """Delete the job of this id, or else the newest of this name. What is stored of it is not read:
    it may be damaged."""
    if JOB_ID.fullmatch(job):
        with suppress(UnknownJob):
            return reader.delete(job, force)
    with suppress(UnknownJob):  # deleted since it was listed
        for named in reader.jobs(job):
            return reader.delete(named.id, force)
    raise no_such_job(job)

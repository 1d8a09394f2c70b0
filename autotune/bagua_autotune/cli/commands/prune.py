"""``bagua-autotune prune``: delete old jobs."""

from __future__ import annotations

from datetime import datetime

import click

from bagua_autotune.cli.output import print_table, say_beside
from bagua_autotune.cli.reader import NO_JOBS, NoJobsYet, open_reader, source_options
from bagua_autotune.store.maintenance.retention import DeletedJob

COLUMNS = ("job", "name", "state", "last contact")


def row_of(job: DeletedJob) -> tuple[str, str, str, str]:
    """A deleted job in COLUMNS."""
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
    print_table(COLUMNS, rows)
    if dry_run:
        jobs = f"{len(rows)} {'job' if len(rows) == 1 else 'jobs'}"
        say_beside(f"nothing is deleted: without --dry-run {jobs} would be")

"""``bagua-autotune jobs``: list the jobs."""

from __future__ import annotations

import click

from bagua_autotune.cli.output import print_table, times
from bagua_autotune.cli.reader import open_reader, source_options
from bagua_autotune.model.text import describe
from bagua_autotune.views import JobSummary
from bagua_autotune.views.overviews import MOST_JOBS_LISTED

COLUMNS = ("job", "name", "state", "trials", "speed-up", "configuration", "lives")


@click.command()
@click.option(
    "--limit", type=click.IntRange(1, MOST_JOBS_LISTED - 1), default=100, show_default=True,
    help="List at most so many.",
)  # fmt: skip
@source_options
def jobs(limit: int, database: str | None, url: str | None) -> None:
    """List the jobs, newest first. One that was started again is its newest life."""
    found = open_reader(database, url).jobs(limit=limit + 1)
    print_table(COLUMNS, [_row(job) for job in found[:limit]])
    if len(found) > limit:
        # Not among the lines that a pipe reads.
        click.echo(f"there are more than these {limit}; see --limit", err=True)


def _row(job: JobSummary) -> tuple[str, ...]:
    return (
        job.id,
        job.name,
        job.state,
        str(job.progress.trials_measured),
        times(job.figures.speedup),
        describe(job.configuration),
        str(job.life),
    )

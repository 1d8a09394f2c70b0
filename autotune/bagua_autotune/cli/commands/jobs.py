"""``bagua-autotune jobs``: list the jobs."""

from __future__ import annotations

import click

from bagua_autotune.cli.output import print_json, print_table, say_beside, times
from bagua_autotune.cli.overview_panel import silence
from bagua_autotune.cli.reader import NoJobsYet, no_jobs, open_reader, source_options
from bagua_autotune.views import JobList, JobSummary
from bagua_autotune.views.overviews import MOST_JOBS_LISTED
from bagua_wire.words import describe

COLUMNS = ("job", "name", "state", "trials", "speed-up", "runs now", "lives")


@click.command()
@click.option(
    "--limit", type=click.IntRange(1, MOST_JOBS_LISTED - 1), default=100, show_default=True,
    help="List at most so many jobs.",
)  # fmt: skip
@click.option("--json", "is_json", is_flag=True, help="Write what GET /api/v2/jobs answers.")
@source_options
def jobs(limit: int, is_json: bool, database: str | None, url: str | None) -> None:
    """List the jobs, newest first. A training that was started again is listed once."""
    try:
        found = open_reader(database, url).jobs(limit=limit + 1)
    except NoJobsYet:
        found = []
    has_more = len(found) > limit
    found = found[:limit]
    if is_json:
        print_json(JobList(jobs=found, next=found[-1].id if has_more else None))
    else:
        print_table(COLUMNS, [_row(job) for job in found])
    if not found:
        say_beside(no_jobs(database, url))
    elif has_more:
        say_beside(f"there are more than these {limit}; see --limit")


def _row(job: JobSummary) -> tuple[str, ...]:
    # Without a result the speed-up is that of the best trial, and what runs now may be another.
    doubt = ", not confirmed" if job.figures.speedup is not None and job.reason is None else ""
    return (
        job.id,
        job.name,
        f"{job.state}, silent" if silence(job) else job.state,
        str(job.progress.trials_measured),
        times(job.figures.speedup) + doubt,
        describe(job.configuration),
        str(job.life),
    )

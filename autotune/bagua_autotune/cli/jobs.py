"""``bagua-autotune jobs``: list the jobs."""

from __future__ import annotations

import click

from bagua_autotune.api.messages import JobState
from bagua_autotune.cli.output import print_table, times
from bagua_autotune.cli.reader import open_reader, source_options
from bagua_autotune.model.text import describe

COLUMNS = ("job", "name", "state", "trials", "speed-up", "configuration")


@click.command()
@source_options
def jobs(database: str | None, url: str | None) -> None:
    """List the jobs, newest first."""
    print_table(COLUMNS, [_row(job) for job in open_reader(database, url).jobs()])


def _row(job: JobState) -> tuple[str, ...]:
    speedup = job.result.speedup if job.result else job.progress.speedup
    return (
        job.id,
        job.name,
        job.state,
        str(job.progress.trials_measured),
        times(speedup),
        describe(job.configuration),
    )

"""``bagua-autotune delete``: delete one job."""

from __future__ import annotations

import click

from bagua_autotune.cli.commands.prune import COLUMNS, row_of
from bagua_autotune.cli.output import print_table
from bagua_autotune.cli.reader import find_job, no_such_job, open_reader, source_options
from bagua_autotune.store.errors import UnknownJob


@click.command()
@click.argument("job")
@click.option(
    "--force",
    is_flag=True,
    help="Delete it even if its training may still run. The training goes on; while it is being "
    "tuned it registers again, and is tuned from its beginning.",
)
@source_options
def delete(job: str, force: bool, database: str | None, url: str | None) -> None:
    """Delete JOB with all that is stored of it, and list what was deleted.

    A training that was started again is one job for each of its lives: all of them go.
    """
    reader = open_reader(database, url)
    found = find_job(reader, job).job
    try:
        deleted = reader.delete(found.id, force)
    except UnknownJob as error:
        raise no_such_job(job) from error
    print_table(COLUMNS, [row_of(each) for each in deleted.jobs])

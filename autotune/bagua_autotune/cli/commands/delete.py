"""``bagua-autotune delete``: delete one job."""

from __future__ import annotations

from contextlib import suppress

import click

from bagua_autotune.cli.commands.prune import COLUMNS, row_of
from bagua_autotune.cli.output import print_table
from bagua_autotune.cli.reader import Reader, no_such_job, open_reader, source_options
from bagua_autotune.model.characters import JOB_ID
from bagua_autotune.store.errors import UnknownJob
from bagua_autotune.store.maintenance.retention import Deleted


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
    deleted = _delete(open_reader(database, url), job, force)
    print_table(COLUMNS, [row_of(each) for each in deleted.jobs])


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

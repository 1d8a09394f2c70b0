"""``bagua-autotune prune``: delete old jobs."""

from __future__ import annotations

import time
from datetime import datetime

import click

from bagua_autotune.cli.output import print_table
from bagua_autotune.cli.reader import open_store, store_errors_told
from bagua_autotune.store import retention

COLUMNS = ("job", "name", "state", "last contact")
DAY_SECONDS = 86_400


@click.command()
@click.option(
    "--older-than",
    "days",
    type=click.IntRange(min=1),
    required=True,
    metavar="DAYS",
    help="Delete jobs not heard of for so many days.",
)
@click.option("--database", metavar="URL", help="Delete from this one.  [default: serve's]")
def prune(days: int, database: str | None) -> None:
    """Delete jobs with all that is stored of them, and say which.

    A job that is tuned is heard of every few seconds, so none of these is. The service does so by
    itself, see --keep-days of serve.
    """
    store = open_store(database)
    with store_errors_told():
        pruned = retention.prune(store, time.time() - days * DAY_SECONDS)
        retention.shrink(store)
    rows = [
        (job.id, job.name, job.phase, f"{datetime.fromtimestamp(job.last_contact_at):%F %T}")
        for job in pruned
    ]
    print_table(COLUMNS, rows)

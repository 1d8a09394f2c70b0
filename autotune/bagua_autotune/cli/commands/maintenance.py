"""``bagua-autotune backup``, ``restore`` and ``doctor``: copy and check the database."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import click

from bagua_autotune.cli.output import say
from bagua_autotune.cli.reader import database_url, open_store
from bagua_autotune.model.text import describe_count
from bagua_autotune.store.errors import StoreError
from bagua_autotune.store.maintenance import backups, checkup


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

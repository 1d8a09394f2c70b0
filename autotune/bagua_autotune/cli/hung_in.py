"""What hangs in from packages that the service does not need, by entry points.

It stands alone because the list of commands and ``export`` both look there.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

import click

COMMANDS = "bagua_autotune.commands"
"""Each is a click command."""
FORMATS = "bagua_autotune.formats"
"""Each is what writes a job in a format of ``export``: from a reader and the job's overview to
text."""


def of(group: str) -> dict[str, EntryPoint]:
    """Those of a group, by name."""
    return {each.name: each for each in entry_points(group=group)}


def load(entry: EntryPoint) -> Any:
    """What the entry point names.

    Raises:
        ClickException: its package is not installed.
    """
    package = package_of(entry)
    try:
        return entry.load()
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise click.ClickException(
            f"{entry.name} comes with the package {package}, which is not installed"
        ) from error


def package_of(entry: EntryPoint) -> str:
    return entry.module.partition(".")[0]

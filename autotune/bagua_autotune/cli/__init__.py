"""The command ``bagua-autotune``. Each of its commands is imported when it runs.

Packages that the service does not need hang in by entry points: those of the group
``bagua_autotune.commands`` name a click command each, those of ``bagua_autotune.formats`` what
writes a job in a format of ``export``, from a reader and the job's overview to text.
"""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import click

from bagua_autotune import __version__

# Each with the first sentence of its own help.
COMMANDS = {
    "serve": "Run the service until SIGTERM or Ctrl-C.",
    "jobs": "List the jobs, newest first.",
    "show": "Show JOB: its trials, the best one, its speed-up, and a line for stock DDP.",
    "watch": "Watch JOB until it is tuned or its training has ended.",
    "export": "Write JOB to the standard output, in one format.",
    "delete": "Delete JOB with all that is stored of it, and list what was deleted.",
    "prune": "Delete old jobs with all that is stored of them, and list them.",
    "backup": "Copy the SQLite database to FILE, also while a service uses it.",
    "restore": "Put FILE, a copy that backup made, in the place of the SQLite database.",
    "doctor": "Check the database: one line for each check; exit status 1 if one finds a fault.",
}
MODULES = {
    "jobs": "show",
    **dict.fromkeys(("delete", "prune", "backup", "restore", "doctor"), "maintenance"),
}
"""The other commands have modules of their names."""
OF_OUR_PACKAGES = {
    "check": "Say how much faster COMMAND could train, at most and likely, if it were tuned.",
    "system": "Find settings with which COMMAND trains faster.",
    "simulate": "Simulate steps on a cluster: step time by bucket size and way of reducing, or by "
    "algorithm.",
}
"""The same sentence of commands that hang in from our other packages, which may be left out."""


def hung_in(group: str) -> dict[str, EntryPoint]:
    """What hangs in as ``commands`` or as ``formats``, by name."""
    return {each.name: each for each in entry_points(group=f"bagua_autotune.{group}")}


def load(entry: EntryPoint) -> Any:
    """What the entry point names.

    Raises:
        ClickException: its package is not installed.
    """
    package = _package(entry)
    try:
        return entry.load()
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise click.ClickException(
            f"{entry.name} comes with the package {package}, which is not installed"
        ) from error


def _package(entry: EntryPoint) -> str:
    return entry.module.partition(".")[0]


class Commands(click.Group):
    """Lists its commands without importing them: each needs large modules that others do not."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_sentences())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command: click.Command | None = None
        if cmd_name in COMMANDS:
            module = f"bagua_autotune.cli.commands.{MODULES.get(cmd_name, cmd_name)}"
            command = getattr(importlib.import_module(module), cmd_name)
        elif entry := hung_in("commands").get(cmd_name):
            command = load(entry)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_sentences().items()))


def _sentences() -> dict[str, str]:
    """What there is of commands, those of the service first: none takes the place of one."""
    others = {
        name: OF_OUR_PACKAGES.get(name, f"A command of {_package(entry)}.")
        for name, entry in hung_in("commands").items()
    }
    return COMMANDS | {name: said for name, said in others.items() if name not in COMMANDS}


# Made by click, from the options of the commands.
COMPLETION = """
The Tab key completes commands and options after this line in ~/.bashrc (zsh_source is for zsh,
fish_source for fish):

\b
  eval "$(_BAGUA_AUTOTUNE_COMPLETE=bash_source bagua-autotune)"
"""


@click.group(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"]}, epilog=COMPLETION
)
@click.version_option(__version__, prog_name="bagua-autotune")
def main() -> None:
    """Finds the fastest communication settings of a running training job.

    JOB is a job's id, or a name: then the newest job of that name.
    """

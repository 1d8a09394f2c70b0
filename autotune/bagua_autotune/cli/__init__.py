"""The command ``bagua-autotune``: one module for each of its commands, imported when it is used."""

from __future__ import annotations

import importlib

import click

from bagua_autotune import __version__

# With the first sentence of each one's help.
COMMANDS = {
    "serve": "Run the service until SIGTERM or Ctrl-C.",
    "jobs": "List the jobs, newest first.",
    "show": "Show JOB (an id, or a name: its newest): trials, incumbent, speed-up, line for DDP.",
    "watch": "Watch JOB (an id, or a name: its newest) until it is tuned or its training has "
    "ended.",
    "export": "Write JOB (an id, or a name: its newest) to the standard output, in one format.",
    "simulate": "Simulate steps on a cluster: which bucket size, which way of reducing, how much "
    "faster.",
    "check": "Say how much faster COMMAND could train at most, if its communication were tuned.",
    "system": "Find environment variables with which COMMAND trains faster.",
    "prune": "Delete old jobs with all that is stored of them, and list them.",
    "backup": "Copy the SQLite database to FILE, also while a service uses it.",
    "doctor": "Look whether the database is well: one line for each thing; status 1 after a fault.",
}
MODULES = {"backup": "upkeep", "doctor": "upkeep"}  # others have one of their own


class Commands(click.Group):
    """Lists its commands without importing them: most need much that the others do not."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"bagua_autotune.cli.{MODULES.get(cmd_name, cmd_name)}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


# Made by click, from the options of the commands.
COMPLETION = (
    'Completion with the Tab key, in bash: eval "$(_BAGUA_AUTOTUNE_COMPLETE=bash_source '
    'bagua-autotune)"; zsh_source and fish_source are for those shells.'
)


@click.group(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"]}, epilog=COMPLETION
)
@click.version_option(__version__, prog_name="bagua-autotune")
def main() -> None:
    """Finds the fastest communication settings of a running training job."""

"""The command ``bagua-autotune``: one module for each of its commands."""

from __future__ import annotations

import click

from bagua_autotune import __version__
from bagua_autotune.cli.export import export
from bagua_autotune.cli.jobs import jobs
from bagua_autotune.cli.prune import prune
from bagua_autotune.cli.serve import serve
from bagua_autotune.cli.show import show
from bagua_autotune.cli.simulate import simulate
from bagua_autotune.cli.system import system
from bagua_autotune.cli.upkeep import backup, doctor
from bagua_autotune.cli.watch import watch


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="bagua-autotune")
def main() -> None:
    """Finds the fastest communication settings of a running training job."""


for command in (serve, jobs, show, watch, export, simulate, system, prune, backup, doctor):
    main.add_command(command)

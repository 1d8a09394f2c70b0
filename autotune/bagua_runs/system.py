"""``bagua-autotune system``: settings that a job reads only when it starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from bagua_autotune.cli.output import INTERRUPTED, say_beside
from bagua_autotune.model.text import visible
from bagua_runs.asked import ALLOWANCES
from bagua_runs.job import Interrupted, Job, stopping
from bagua_runs.outcomes import Outcome
from bagua_runs.places import Start
from bagua_runs.presets import BACKENDS, PRESETS
from bagua_runs.report import (
    best_so_far,
    document,
    export_lines,
    last_lines,
    only_failures,
    other_lines,
    summary,
)
from bagua_runs.search import FEWEST_RUNS, BaselineFailure, SystemSearch, Verdict
from bagua_runs.session import AUTO, Request, Session


def job_name(context: click.Context, parameter: click.Parameter, text: str | None) -> str | None:
    """An option's name of a job, which must be one that a service takes."""
    try:
        return text if text is None else visible(text)
    except ValueError as error:
        raise click.BadParameter(f"it {error}", context, parameter) from error


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--metric", metavar="REGEX",
    help="Expression whose one group finds the speed in the output.  [default: optimizer steps "
    "are timed]",
)  # fmt: skip
@click.option(
    "--higher-is-better/--lower-is-better", default=True, show_default=True,
    help="Whether --metric finds a speed or a time.",
)  # fmt: skip
@click.option(
    "--last",
    is_flag=True,
    help="Take the last number that --metric finds.  [default: the median of all]",
)
@click.option(
    "--steps", type=click.IntRange(3),
    help="Steps to time in each run before it is ended. With --metric: numbers to find.  "
    "[default: 30 steps; with --metric each run goes to its end]",
)  # fmt: skip
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=300.0,
              show_default=True, metavar="SECONDS",
              help="A run that takes longer counts as failed.")  # fmt: skip
@click.option("--runs", type=click.IntRange(FEWEST_RUNS), default=25, show_default=True,
              help="Most runs in all.")  # fmt: skip
@click.option("--minutes", type=click.FloatRange(0, min_open=True),
              help="Most minutes in all, with those before an interruption.")  # fmt: skip
@click.option("--backend", type=click.Choice([AUTO, *BACKENDS]), default=AUTO,
              show_default=True, help="The backend whose variables are searched.")  # fmt: skip
@click.option("--preset", "presets", multiple=True, type=click.Choice(list(PRESETS)),
              help="Search the settings of this program; may be repeated.")  # fmt: skip
@click.option("--allow", "allowed", multiple=True, type=click.Choice(ALLOWANCES),
              help="Let a preset change the numbers that are computed, or take more memory; may "
              "be repeated.")  # fmt: skip
@click.option("--set", "variables", multiple=True, metavar="NAME=VALUES",
              help="Search these values of this variable: V1,V2,... or LOW..HIGH or LOW..HIGH:log; "
              "may be repeated, as the next three.")  # fmt: skip
@click.option("--arg", "arguments", multiple=True, metavar="--NAME[=VALUES]",
              help="Search these values of this argument of COMMAND; without values it is given "
              "or not given.")  # fmt: skip
@click.option("--json", "json_keys", multiple=True, metavar="FILE:KEY.KEY=VALUES",
              help="Search these values of a key of this file, which COMMAND names; each run gets "
              "a copy.")  # fmt: skip
@click.option("--yaml", "yaml_keys", multiple=True, metavar="FILE:KEY.KEY=VALUES",
              help="The same for a YAML file.")  # fmt: skip
@click.option("--only-with", nargs=2, multiple=True, metavar="NAME OTHER=VALUES",
              help="NAME has an effect only where OTHER has one of these values; may be repeated."
              )  # fmt: skip
@click.option("--takes-memory", multiple=True, metavar="NAME",
              help="Larger values of NAME take more memory; may be repeated.")  # fmt: skip
@click.option("--interface", "interfaces", multiple=True, metavar="NAME",
              help="Try this network interface, alone and with others; may be repeated."
              )  # fmt: skip
@click.option(
    "--only", multiple=True, metavar="NAME", help="Search only this setting; may be repeated."
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of the search's random choices."
)
@click.option("--keep", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER",
              help="Write the changed files of the result into this folder.")  # fmt: skip
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False),
              metavar="FILE", help="Write all runs to this file, as JSON.")  # fmt: skip
@click.option("--job", callback=job_name, help="Name of the search in lists and on the page.  "
              "[default: that of the script or program]")  # fmt: skip
@click.option("--database", metavar="URL", help="Keep the runs in this database.  [default: the "
              "one that serve uses]")  # fmt: skip
@click.option("--gpus", type=click.IntRange(0), help="How many GPUs COMMAND uses, for the price.  "
              "[default: its ranks, if they use GPUs]")  # fmt: skip
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def system(**given: Any) -> None:
    """Find settings with which COMMAND trains faster.

    It runs COMMAND several times for a few steps, each time with other settings, and measures the
    step time. Settings are variables, those of NCCL or gloo unless a preset is named, arguments of
    COMMAND, and keys of files that it names. The result is printed as lines for a shell: eval
    "$(bagua-autotune system -- torchrun ... train.py)" sets the fastest variables. All else goes
    to standard error: the progress, and the command with the fastest arguments. Each run is stored:
    the same command goes on with a search that was interrupted.
    """
    request = Request(**given)
    asked = request.asked()
    for phrase in asked.left_out:
        say_beside(f"left out: {phrase}")
    places = {name: setting.place for name, setting in asked.settings.items()}
    verdict: Verdict | None = None
    start: Start | None = None
    price = ""
    measure = request.measure()
    with stopping() as signals, request.record(asked) as record:
        job = Job(request.command, measure, lambda: bool(signals), places, record.beat)
        session = Session(request, asked, job, record, measure, say_beside)
        try:
            verdict = session.run()
            start = job.start(session.changes(verdict.configuration), request.keep)
            price = session.finish(verdict, request.gpus)
        except BaselineFailure as failure:
            raise click.ClickException(_explain(failure.outcome)) from failure
        except ValueError as error:
            raise click.ClickException(str(error)) from error
        except Interrupted:
            _tell_best(session.search, job)
            if record.is_kept:
                say_beside("the same command goes on with this search")
        finally:
            if request.output and session.search:
                runs = document(session.search, request.command, verdict, start)
                try:
                    request.output.write_text(json.dumps(runs, indent=2) + "\n")
                except OSError as error:
                    say_beside(f"--output cannot be written: {error}")
    if session.search is None or verdict is None or start is None:
        sys.exit(INTERRUPTED)
    if only_failures(session.search):
        say_beside(price)
        raise click.ClickException(summary(session.search, verdict))
    _tell(session.search, verdict, start, price)


def _explain(outcome: Outcome) -> str:
    said = ["; its last lines:", *last_lines(outcome)] if outcome.last_lines else []
    return f"the job fails with your own settings: {outcome.failure}" + "\n".join(said)


def _tell(search: SystemSearch, verdict: Verdict, start: Start, price: str) -> None:
    say_beside(summary(search, verdict))
    say_beside(price)
    changes = search.space.changes(verdict.configuration)
    for line in other_lines(search.space, changes, start):
        say_beside(line)
    for line in export_lines(start):
        click.echo(line)


def _tell_best(search: SystemSearch | None, job: Job) -> None:
    """An interrupted search sets nothing: without a comparison in turns it may have been luck."""
    best = best_so_far(search) if search else None
    if search is None or best is None:
        say_beside("interrupted; no run was faster than your settings")
        return
    configuration, speedup = best
    say_beside(f"interrupted; the best so far, {speedup:.2f}x, not yet compared in turns:")
    changes = search.space.changes(configuration)
    start = job.start(changes, None)
    for line in [*other_lines(search.space, changes, start), *export_lines(start)]:
        say_beside(line)

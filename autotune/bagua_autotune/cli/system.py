"""``bagua-autotune system``: settings that a process reads only when it starts."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from bagua_autotune.cli.output import say_beside
from bagua_autotune.model.characters import clean
from bagua_autotune.system.job import Interrupted, Job, stopping
from bagua_autotune.system.measures import Measure, Metric, StepTimes
from bagua_autotune.system.report import (
    best_so_far,
    describe_run,
    document,
    export_lines,
    summary,
)
from bagua_autotune.system.runs import Outcome, Run, costs_of
from bagua_autotune.system.search import FEWEST_RUNS, BaselineFailure, SystemSearch, Verdict
from bagua_autotune.system.space import SearchSpace
from bagua_autotune.system.variables import BACKENDS, Variable, find_variables

DEFAULT_STEPS = 30
INTERRUPTED = 130


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
@click.option("--backend", type=click.Choice(["auto", *BACKENDS]), default="auto",
              show_default=True, help="The backend whose variables are searched.")  # fmt: skip
@click.option("--set", "chosen", multiple=True, metavar="NAME=V1,V2,...",
              help="Search these values of this variable, too; may be repeated.")  # fmt: skip
@click.option("--interface", "interfaces", multiple=True, metavar="NAME",
              help="Try this network interface, alone and with others; may be repeated."
              )  # fmt: skip
@click.option(
    "--only", multiple=True, metavar="NAME", help="Search only this variable; may be repeated."
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of the search's random choices."
)
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False),
              metavar="FILE", help="Write all runs to this file.")  # fmt: skip
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def system(
    metric: str | None,
    higher_is_better: bool,
    last: bool,
    steps: int | None,
    timeout: float,
    runs: int,
    backend: str,
    chosen: Sequence[str],
    interfaces: Sequence[str],
    only: Sequence[str],
    seed: int,
    json_path: Path | None,
    command: Sequence[str],
) -> None:
    """Find environment variables with which COMMAND trains faster.

    It runs COMMAND several times for a few steps, each time with other settings of NCCL or gloo,
    and measures the step time. The result is printed as lines for a shell: eval "$(bagua-autotune
    system -- torchrun ... train.py)" sets the fastest settings. Progress goes to standard error.
    """
    given = dict(map(_assignment, chosen))
    measure = _measure(metric, higher_is_better, last, steps)
    search: SystemSearch | None = None
    verdict: Verdict | None = None
    with stopping() as signals:
        job = Job(command, measure, lambda: bool(signals))
        try:
            first = job({}, timeout)
            say_beside(describe_run(1, runs, {}, first, [], measure))
            if first.cost is None:
                raise BaselineFailure(first)
            variables = _variables(measure.facts, backend, given, interfaces, only)
            space = SearchSpace(variables, seed)
            own = Run(1, "baseline", space.own, first)

            def on_run(run: Run) -> None:
                assert search is not None
                own_costs = costs_of(search.runs, space.own)
                environment = space.environment(run.configuration)
                say_beside(
                    describe_run(run.number, runs, environment, run.outcome, own_costs, measure)
                )

            search = SystemSearch(space, job, runs, timeout, seed, on_run, (own,))
            say_beside("searched: " + ", ".join(variable.name for variable in space.variables))
            verdict = search.find()
        except BaselineFailure as failure:
            raise click.ClickException(_explain(failure.outcome)) from failure
        except ValueError as error:
            raise click.ClickException(str(error)) from error
        except Interrupted:
            _tell_best(search)
        finally:
            if json_path and search:
                text = json.dumps(document(search, verdict, command), indent=2)
                json_path.write_text(text + "\n")
    if search is None or verdict is None:
        sys.exit(INTERRUPTED)
    say_beside(summary(search, verdict))
    for line in export_lines(search.space.environment(verdict.configuration)):
        click.echo(line)


def _variables(
    facts: Mapping[str, Any],
    asked: str,
    given: dict[str, list[str]],
    interfaces: Sequence[str],
    only: Sequence[str],
) -> list[Variable]:
    """The variables to search. Raises ValueError if there are none."""
    backend = _backend(asked, str(facts.get("backend", "")))
    has_client = bool(facts.get("has_client"))
    found = find_variables(backend, has_client, os.environ, given, interfaces, only)
    if not found:
        raise ValueError(
            f"nothing to search: {backend} has no variable to tune, and the job does not use "
            "bagua_client, whose channels could be searched; name variables with --set"
        )
    return found


def _measure(metric: str | None, higher_is_better: bool, last: bool, steps: int | None) -> Measure:
    if metric is None:
        return StepTimes(steps or DEFAULT_STEPS)
    try:
        return Metric(re.compile(metric), higher_is_better, last, steps)
    except (re.error, ValueError) as error:
        raise click.BadParameter(str(error), param_hint="--metric") from error


def _assignment(text: str) -> tuple[str, list[str]]:
    name, _, values = text.partition("=")
    listed = [value.strip() for value in values.split(",") if value.strip()]
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or not listed:
        raise click.BadParameter(f"{text!r} is not NAME=V1,V2,...", param_hint="--set")
    return name, listed


def _backend(asked: str, found: str) -> str:
    """The one asked for, or else the job's own, or else the usual one of this machine."""
    if asked != "auto":
        return asked
    for backend in BACKENDS:
        if backend in found:
            return backend
    return "nccl" if Path("/dev/nvidia0").exists() else "gloo"


def _explain(outcome: Outcome) -> str:
    lines = "".join(f"\n    {clean(line)}" for line in outcome.last_lines)
    said = f"; its last lines:{lines}" if lines else ""
    return f"the job fails with your own settings: {outcome.failure}{said}"


def _tell_best(search: SystemSearch | None) -> None:
    """An interrupted search sets nothing: without a comparison in turns it may have been luck."""
    best = best_so_far(search) if search else None
    if search is None or best is None:
        say_beside("interrupted; no run was faster than your settings")
        return
    configuration, speedup = best
    say_beside(f"interrupted; the best so far, {speedup:.2f}x, not yet compared in turns:")
    for line in export_lines(search.space.environment(configuration)):
        say_beside(line)

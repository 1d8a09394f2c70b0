"""``bagua-autotune system``: settings that a job reads only when it starts. A whole search for a
command: what is asked for, the first run and what it shows, the rest."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from bagua_autotune.cli.output import INTERRUPTED, say_beside
from bagua_autotune.cli.reader import database_url
from bagua_autotune.model.job import LONGEST_NAME, Limits
from bagua_autotune.model.text import clean, visible
from bagua_autotune.store import Store
from bagua_autotune.store.errors import OtherSchema, StoreError
from bagua_runs.asked import ALLOWANCES, Asked, Options, asked_settings, searched
from bagua_runs.job import Interrupted, Job, stopping
from bagua_runs.outcomes import BASELINE, Measure, Metric, Outcome, Run, StepTimes, costs_of
from bagua_runs.places import Start
from bagua_runs.presets import BACKENDS, INTERFACES, PRESETS, find_variables
from bagua_runs.record import About, Diverged, Record, alone
from bagua_runs.report import (
    best_so_far,
    describe_price,
    describe_run,
    document,
    export_lines,
    failed_result,
    job_result,
    last_lines,
    only_failures,
    other_lines,
    summary,
)
from bagua_runs.search import FEWEST_RUNS, BaselineFailure, SystemSearch, Verdict
from bagua_runs.space import SearchSpace, Setting
from bagua_wire.limits import MOST_SAMPLES

AUTO = "auto"
DEFAULT_STEPS = 30
# What a search is the same by: all but where it is kept, and what is done with its result.
NOT_OF_THE_SEARCH = ("job", "database", "gpus", "keep", "output")


@dataclass(frozen=True, kw_only=True)
class Request(Options):
    """What is asked for: the options and the command, by the names of ``system``'s parameters."""

    command: tuple[str, ...]
    metric: str | None
    higher_is_better: bool
    last: bool
    steps: int | None
    timeout: float
    runs: int
    backend: str
    interfaces: Sequence[str]
    only: Sequence[str]
    seed: int
    keep: Path | None
    output: Path | None
    job: str | None
    database: str | None
    minutes: float | None
    gpus: int | None

    def measure(self) -> Measure:
        """How the speed is found. Raises click.BadParameter."""
        if self.metric is None:
            return StepTimes(self.steps or DEFAULT_STEPS)
        try:
            pattern = re.compile(self.metric)
            return Metric(pattern, self.higher_is_better, self.last, self.steps)
        except (re.error, ValueError) as error:
            raise click.BadParameter(str(error), param_hint="--metric") from error

    def asked(self) -> Asked:
        """What the user named. Raises click.UsageError before anything has run."""
        try:
            if self.keep:
                self.keep.mkdir(parents=True, exist_ok=True)
            if self.output and not self.output.parent.is_dir():
                raise ValueError(f"--output: there is no folder {self.output.parent}")
            return asked_settings(self, self.command, os.environ)
        except (ValueError, OSError) as error:
            raise click.UsageError(str(error)) from error

    @property
    def most_seconds(self) -> float:
        """That all runs may take."""
        return math.inf if self.minutes is None else 60 * self.minutes

    @contextmanager
    def record(self, asked: Asked) -> Iterator[Record]:
        """Where the runs are kept."""
        store, about = _open(self.database), self._about(asked)
        try:
            with alone(about.fingerprint) as is_alone:
                if not is_alone:
                    say_beside("another search with this command runs: this one begins anew")
                yield Record(store, about, say_beside, goes_on=is_alone)
        finally:
            if store is not None:
                store.close()

    def _about(self, asked: Asked) -> About:
        limits = Limits(
            max_samples=min(self.runs, MOST_SAMPLES),
            max_seconds=None if self.minutes is None else min(60 * self.minutes, 1e9),
        )
        name = clean(self.job or name_of(self.command))[:LONGEST_NAME]
        return About(name, self._fingerprint(asked), limits, has_seconds=self.metric is None)

    def _fingerprint(self, asked: Asked) -> str:
        """Equal for the same command with the same settings, limits and seed, in the same folder of
        the same machine."""
        given = {k: v for k, v in vars(self).items() if k not in NOT_OF_THE_SEARCH}
        settings = [
            [s.name, s.values, s.own, s.assumed, s.takes_memory, s.condition and vars(s.condition)]
            for s in asked.settings.values()
        ]
        told = json.dumps([given, settings, os.getcwd(), platform.node()], sort_keys=True)
        return hashlib.sha256(told.encode(errors="surrogateescape")).hexdigest()


def name_of(command: Sequence[str]) -> str:
    """The name of the script that a command runs, or else of its program.

    >>> name_of(["torchrun", "--nproc-per-node", "2", "jobs/train.py", "--lr", "1"])
    'train.py'
    """
    script = next((part for part in command if part.endswith(".py")), command[0])
    return os.path.basename(script) or script


def _open(url: str | None) -> Store | None:
    """The database; None, with a line that says why, if nothing can be kept."""
    try:
        try:
            return Store(database_url(url), as_found=True)
        except OtherSchema:
            raise  # a service of another release may use it
        except StoreError:
            return Store(database_url(url))  # there is none yet
    except StoreError as error:
        say_beside(f"the search goes on, but is not stored: {error}")
        return None


class Session:
    """One search.

    Args:
        request: what is asked for; ``asked``: of it, what is varied.
        job: runs the command.
        record: keeps the runs.
        measure: which the job uses.

    Attributes:
        search: None until the first run has succeeded.
        facts: of the first run.
    """

    def __init__(
        self, request: Request, asked: Asked, job: Job, record: Record, measure: Measure
    ) -> None:
        self._request = request
        self._asked = asked
        self._job = job
        self._record = record
        self._measure = measure
        self.search: SystemSearch | None = None
        self.facts: Mapping[str, Any] = {}
        self._shown_failures: set[str] = set()

    def run(self) -> Verdict:
        """Search to the end, from where an interrupted search was.

        Raises:
            BaselineFailure: the job fails with the user's own settings.
            ValueError: there is nothing to search, or a name in ``only`` is unknown.
            Interrupted: by the job.
        """
        try:
            try:
                return self._find(self._record.resume())
            except Diverged:
                self._record.forget()
                return self._find(None)
        except Interrupted:
            self._record.interrupted()
            raise
        except BaselineFailure as failure:
            if self.search is not None:
                own, runs = self.search.space.own, len(self.search.runs)
                seconds = self._record.spent_seconds()
                settings = self.search.space.settings_of(own)
                words = failure.outcome.failure
                self._record.finish(failed_result(settings, runs, seconds, words))
            raise

    def finish(self, verdict: Verdict, gpus: int | None = None) -> str:
        """Keep the result; the price of the search in words.

        Args:
            gpus: that the job uses; None: one for each rank, if it uses any.
        """
        assert self.search is not None
        if gpus is None:
            gpus = int(self.facts.get("ranks", 0)) if self.facts.get("device") == "cuda" else 0
        seconds, own = self._record.spent_seconds(), self.search.space.own
        gain = None if verdict.configuration == own else verdict.gain
        price = describe_price(seconds, gpus, gain)
        has_seconds = isinstance(self._measure, StepTimes)
        self._record.finish(job_result(self.search, verdict, price, seconds, has_seconds))
        return price

    def _find(self, known: Mapping[str, Any] | None) -> Verdict:
        """Search to the end.

        Args:
            known: the facts of an interrupted search; None: this one is new.
        """
        request = self._request
        first = self._run_first() if known is None else None
        self.facts = self._measure.facts if known is None else known
        space = SearchSpace(self._settings(self.facts), request.seed)
        self._record.begin(space, self.facts)
        outcome = self._record.recalled(1, BASELINE, space.settings_of(space.own))
        if outcome is None:
            outcome = first or self._run_first()
            self._record.ends(1, outcome)
        own = Run(1, BASELINE, space.own, outcome)
        self.search = SystemSearch(
            space, self._job, request.runs, request.timeout, self._on_run, (own,),
            self._record, request.most_seconds,
        )  # fmt: skip
        say_beside("searched: " + ", ".join(space.names))
        return self.search.find()

    def _run_first(self) -> Outcome:
        request = self._request
        first = self._job({}, request.timeout)
        say_beside(describe_run(1, request.runs, {}, first, [], self._measure))
        if first.cost is None:
            raise BaselineFailure(first)
        return first

    def _on_run(self, run: Run) -> None:
        assert self.search is not None
        space = self.search.space
        own_costs = costs_of(self.search.runs, space.own)
        changes = space.changes(run.configuration)
        say_beside(
            describe_run(
                run.number, self._request.runs, changes, run.outcome, own_costs, self._measure
            )
        )
        if run.cost is None and not run.outcome.is_out_of_memory:
            self._show_failure(last_lines(run.outcome))

    def _show_failure(self, lines: Sequence[str]) -> None:
        """Show what a failed run printed last, unless another printed the same but for numbers,
        such as times and process ids."""
        kind = re.sub(r"\d+", "0", "\n".join(lines))
        if kind not in self._shown_failures:
            self._shown_failures.add(kind)
            for line in lines:
                say_beside(line)

    def _settings(self, facts: Mapping[str, Any]) -> list[Setting]:
        """Raises ValueError if there are none."""
        request = self._request
        backend = _backend(request.backend, str(facts.get("backend", "")))
        has_client = bool(facts.get("has_client"))
        known = find_variables(backend, has_client, os.environ, request.interfaces, request.only)
        if request.presets:  # then variables that are searched else are not
            known = [setting for setting in known if setting.name == INTERFACES[backend]]
        settings = {setting.name: setting for setting in known} | self._asked.settings
        if not settings:
            raise ValueError(
                f"nothing to search: {backend} has no variable to tune, and the job does not use "
                "bagua_client, whose channels could be searched; name settings with --set, --arg, "
                "--json, --yaml or --preset"
            )
        found = searched(settings, request.only)
        if not found:
            raise ValueError("nothing to search: no setting has another value than yours")
        return found


def _backend(asked: str, found: str) -> str:
    """The one asked for, or else the job's own, or else the usual one of this machine."""
    if asked != AUTO:
        return asked
    for backend in BACKENDS:
        if backend in found:
            return backend
    return "nccl" if Path("/dev/nvidia0").exists() else "gloo"


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
        session = Session(request, asked, job, record, measure)
        try:
            verdict = session.run()
            assert session.search is not None
            start = job.start(session.search.space.changes(verdict.configuration), request.keep)
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

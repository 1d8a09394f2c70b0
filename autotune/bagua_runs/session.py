"""A whole search for a command: what is asked for, the first run and what it shows, the rest."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from bagua_autotune.cli.output import say_beside
from bagua_autotune.cli.reader import database_url
from bagua_autotune.model.job import LONGEST_NAME, Limits
from bagua_autotune.model.text import clean
from bagua_autotune.store import Store
from bagua_autotune.store.errors import OtherSchema, StoreError
from bagua_runs.asked import Asked, Options, asked_settings, searched
from bagua_runs.job import Interrupted, Job
from bagua_runs.outcomes import BASELINE, Measure, Metric, Outcome, Run, StepTimes, costs_of
from bagua_runs.presets import BACKENDS, INTERFACES, find_variables
from bagua_runs.record import About, Diverged, Record, alone
from bagua_runs.report import (
    describe_price,
    describe_run,
    failed_result,
    job_result,
    last_lines,
)
from bagua_runs.search import BaselineFailure, SystemSearch, Verdict
from bagua_runs.setting import Setting
from bagua_runs.space import SearchSpace
from bagua_wire.configuration import Configuration
from bagua_wire.limits import MOST_SAMPLES

AUTO = "auto"
DEFAULT_STEPS = 30
# What a search is the same by: all but where it is kept, and what is done with its result.
NOT_OF_THE_SEARCH = ("job", "database", "gpus", "keep", "output")


@dataclass(frozen=True)
class Request:
    """What is asked for: the options and the command, by the names of ``system``'s parameters."""

    command: tuple[str, ...]
    metric: str | None
    higher_is_better: bool
    last: bool
    steps: int | None
    timeout: float
    runs: int
    backend: str
    presets: Sequence[str]
    allowed: Sequence[str]
    variables: Sequence[str]
    arguments: Sequence[str]
    json_keys: Sequence[str]
    yaml_keys: Sequence[str]
    only_with: Sequence[tuple[str, str]]
    takes_memory: Sequence[str]
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
        options = Options(
            self.variables, self.arguments, self.json_keys, self.yaml_keys, self.only_with,
            self.takes_memory, self.presets, self.allowed,
        )  # fmt: skip
        try:
            if self.keep:
                self.keep.mkdir(parents=True, exist_ok=True)
            if self.output and not self.output.parent.is_dir():
                raise ValueError(f"--output: there is no folder {self.output.parent}")
            return asked_settings(options, self.command, os.environ)
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
            [
                s.name,
                s.values,
                s.own,
                s.assumed,
                s.takes_memory,
                s.condition and asdict(s.condition),
            ]
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
        say: is called with each line for the user.

    Attributes:
        search: None until the first run has succeeded.
        facts: of the first run.
    """

    def __init__(
        self, request: Request, asked: Asked, job: Job, record: Record, measure: Measure,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._request = request
        self._asked = asked
        self._job = job
        self._record = record
        self._measure = measure
        self._say = say
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
        self._say("searched: " + ", ".join(space.names))
        return self.search.find()

    def _run_first(self) -> Outcome:
        request = self._request
        first = self._job({}, request.timeout)
        self._say(describe_run(1, request.runs, {}, first, [], self._measure))
        if first.cost is None:
            raise BaselineFailure(first)
        return first

    def changes(self, configuration: Configuration) -> dict[str, str]:
        """The values that differ from the user's own, by the names of the settings."""
        assert self.search is not None
        return self.search.space.changes(configuration)

    def _on_run(self, run: Run) -> None:
        assert self.search is not None
        space = self.search.space
        own_costs = costs_of(self.search.runs, space.own)
        changes = space.changes(run.configuration)
        self._say(
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
                self._say(line)

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

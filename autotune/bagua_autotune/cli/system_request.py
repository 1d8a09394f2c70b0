"""What ``bagua-autotune system`` is asked for, and where it keeps its runs."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from bagua_autotune.cli.output import say_beside
from bagua_autotune.cli.reader import database_url
from bagua_autotune.model.characters import clean, visible
from bagua_autotune.model.job import LONGEST_NAME
from bagua_autotune.model.job import Limits as ShownLimits
from bagua_autotune.store import Store
from bagua_autotune.store.errors import OtherSchema, StoreError
from bagua_autotune.system.record import Record
from bagua_autotune.system.running.alone import alone
from bagua_autotune.system.running.measures import Measure, Metric, StepTimes
from bagua_autotune.system.session import Limits
from bagua_autotune.system.settings.asked import Asked, Options, asked_settings
from bagua_autotune.system.stored import About
from bagua_wire.limits import MOST_SAMPLES

DEFAULT_STEPS = 30
# What a search is the same by: all but where it is kept, and what is done with its result.
NOT_OF_THE_SEARCH = ("job", "database", "gpus", "keep", "output")


@dataclass(frozen=True)
class Request:
    """The options and the command, by the names that they have above."""

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
    def limits(self) -> Limits:
        most_seconds = math.inf if self.minutes is None else 60 * self.minutes
        return Limits(
            self.backend, self.interfaces, self.only, self.runs, self.timeout, self.seed,
            most_seconds,
        )  # fmt: skip

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
        limits = ShownLimits(
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


def job_name(context: click.Context, parameter: click.Parameter, text: str | None) -> str | None:
    """An option's name of a job, which must be one that a service takes."""
    try:
        return text if text is None else visible(text)
    except ValueError as error:
        raise click.BadParameter(f"it {error}", context, parameter) from error


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

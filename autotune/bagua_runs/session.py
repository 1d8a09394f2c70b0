"""A whole search for a command: the first run, which settings it shows to matter, and the rest."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagua_autotune.model.statistics import Interval
from bagua_autotune.model.text import describe_seconds
from bagua_runs.asked import Asked, searched
from bagua_runs.job import Interrupted, Job
from bagua_runs.outcomes import BASELINE, Measure, Outcome, Run, StepTimes, costs_of
from bagua_runs.presets import BACKENDS, INTERFACES, find_variables
from bagua_runs.record import Diverged, Record
from bagua_runs.report import describe_run, failed_result, job_result, last_lines
from bagua_runs.search import BaselineFailure, SystemSearch, Verdict
from bagua_runs.setting import Setting
from bagua_runs.space import SearchSpace
from bagua_wire.configuration import Configuration

# What a search cost, and when that is earned.


def describe_price(seconds: float, gpus: int, gain: Interval | None) -> str:
    """Return one line: ``spent 34 GPU-minutes (17.0 min on 2 GPUs); pays after 3.1 h of training at
    1.09x (2.4 h to 5.0 h)``.

    Args:
        seconds: that the search took.
        gpus: on which it ran; 0: that is not known, or there are none.
        gain: of the settings that are kept, how many times as fast they are; None: the user's own
            settings stay, which pays nothing.
    """
    spent = describe_seconds(seconds)
    if gpus:
        minutes = gpus * seconds / 60
        number = f"{minutes:.3g}" if minutes < 100 else f"{minutes:.0f}"
        spent = f"{number} GPU-minutes ({spent} on {gpus} GPU{'s' if gpus > 1 else ''})"
    if gain is None:
        return f"spent {spent}"
    paid = [pays_after_seconds(seconds, times) for times in (gain.center, gain.high, gain.low)]
    center, soonest, latest = (
        "never" if math.isinf(each) else describe_seconds(each) for each in paid
    )
    between = f" ({soonest} to {latest})" if soonest != latest else ""
    return f"spent {spent}; pays after {center} of training at {gain.center:.2f}x{between}"


def pays_after_seconds(seconds: float, speedup: float) -> float:
    """How long it takes to train at this speed-up until it has saved so many seconds: in a second
    it does what took ``speedup`` seconds before."""
    return seconds / (speedup - 1) if speedup > 1 else math.inf


AUTO = "auto"


@dataclass(frozen=True)
class Budget:
    """What is searched, and for how long.

    Attributes:
        backend: whose variables are searched; ``auto``: the job's.
        interfaces: network interfaces that the user named.
        only: names of the settings to vary; empty: all.
        runs: at most, in all.
        most_seconds: that all may take.
        timeout_seconds: a run that takes longer counts as failed.
        seed: of the random choices.
    """

    backend: str
    interfaces: Sequence[str]
    only: Sequence[str]
    runs: int
    timeout_seconds: float
    seed: int
    most_seconds: float = math.inf


class Session:
    """One search.

    Args:
        job: runs the command.
        record: keeps the runs.
        measure: which the job uses.
        asked: what the user named.
        has_preset: the user did, so variables that are searched else are not.
        say: is called with each line for the user.

    Attributes:
        search: None until the first run has succeeded.
        facts: of the first run.
    """

    def __init__(
        self, job: Job, record: Record, measure: Measure, asked: Asked, has_preset: bool,
        limits: Budget, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._job = job
        self._record = record
        self._measure = measure
        self._asked = asked
        self._has_preset = has_preset
        self._limits = limits
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
        limits = self._limits
        first = self._run_first() if known is None else None
        self.facts = self._measure.facts if known is None else known
        space = SearchSpace(self._settings(self.facts), limits.seed)
        self._record.begin(space, self.facts)
        outcome = self._record.recalled(1, BASELINE, space.settings_of(space.own))
        if outcome is None:
            outcome = first or self._run_first()
            self._record.ends(1, outcome)
        own = Run(1, BASELINE, space.own, outcome)
        self.search = SystemSearch(
            space, self._job, limits.runs, limits.timeout_seconds, self._on_run, (own,),
            self._record, limits.most_seconds,
        )  # fmt: skip
        self._say("searched: " + ", ".join(space.names))
        return self.search.find()

    def _run_first(self) -> Outcome:
        limits = self._limits
        first = self._job({}, limits.timeout_seconds)
        self._say(describe_run(1, limits.runs, {}, first, [], self._measure))
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
                run.number, self._limits.runs, changes, run.outcome, own_costs, self._measure
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
        limits = self._limits
        backend = _backend(limits.backend, str(facts.get("backend", "")))
        has_client = bool(facts.get("has_client"))
        known = find_variables(backend, has_client, os.environ, limits.interfaces, limits.only)
        if self._has_preset:
            known = [setting for setting in known if setting.name == INTERFACES[backend]]
        settings = {setting.name: setting for setting in known} | self._asked.settings
        if not settings:
            raise ValueError(
                f"nothing to search: {backend} has no variable to tune, and the job does not use "
                "bagua_client, whose channels could be searched; name settings with --set, --arg, "
                "--json, --yaml or --preset"
            )
        found = searched(settings, limits.only)
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

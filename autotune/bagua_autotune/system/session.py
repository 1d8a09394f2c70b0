"""A whole search for a command: the first run, which settings it shows to matter, and the rest."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagua_autotune.model.knobs import Configuration
from bagua_autotune.system.job import Job
from bagua_autotune.system.measures import Measure
from bagua_autotune.system.report import describe_run
from bagua_autotune.system.runs import Run, costs_of
from bagua_autotune.system.search import BaselineFailure, SystemSearch, Verdict
from bagua_autotune.system.settings.asked import Asked, searched
from bagua_autotune.system.settings.setting import Setting
from bagua_autotune.system.settings.variables import BACKENDS, INTERFACES, find_variables
from bagua_autotune.system.space import SearchSpace

AUTO = "auto"


@dataclass(frozen=True)
class Limits:
    """What is searched, and for how long.

    Attributes:
        backend: whose variables are searched; ``auto``: the job's.
        interfaces: network interfaces that the user named.
        only: names of the settings to vary; empty: all.
        runs: at most, in all.
        timeout_seconds: a run that takes longer counts as failed.
        seed: of the random choices.
    """

    backend: str
    interfaces: Sequence[str]
    only: Sequence[str]
    runs: int
    timeout_seconds: float
    seed: int


class Session:
    """One search.

    Args:
        job: runs the command.
        measure: which the job uses.
        asked: what the user named.
        has_preset: the user did, so variables that are searched else are not.
        say: is called with each line for the user.

    Attributes:
        search: None until the first run has succeeded.
    """

    def __init__(
        self, job: Job, measure: Measure, asked: Asked, has_preset: bool, limits: Limits,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._job = job
        self._measure = measure
        self._asked = asked
        self._has_preset = has_preset
        self._limits = limits
        self._say = say
        self.search: SystemSearch | None = None

    def run(self) -> Verdict:
        """Search to the end.

        Raises:
            BaselineFailure: the job fails with the user's own settings.
            ValueError: there is nothing to search, or a name in ``only`` is unknown.
            Interrupted: by the job.
        """
        limits = self._limits
        first = self._job({}, limits.timeout_seconds)
        self._say(describe_run(1, limits.runs, {}, first, [], self._measure))
        if first.cost is None:
            raise BaselineFailure(first)
        space = SearchSpace(self._settings(self._measure.facts), limits.seed)
        own = Run(1, "baseline", space.own, first)
        self.search = SystemSearch(
            space, self._job, limits.runs, limits.timeout_seconds, limits.seed, self._on_run, (own,)
        )
        self._say("searched: " + ", ".join(space.names))
        return self.search.find()

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

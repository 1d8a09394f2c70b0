"""How a search is written as a job of the store, and read from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bagua_autotune.model.characters import clean
from bagua_autotune.model.job import RUNS, Api, Job, Limits, Trial
from bagua_autotune.model.reasons import RUN_FAILED
from bagua_autotune.model.runs import RunsSpec
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.store import Store
from bagua_autotune.store.trials import Step
from bagua_autotune.system.running.runs import Outcome
from bagua_autotune.system.space import SearchSpace

FACTS = "facts"
KEPT_FACTS = ("backend", "has_client", "ranks", "device")


@dataclass(frozen=True)
class About:
    """What is known of a search before its first run.

    Attributes:
        name: of the job.
        fingerprint: equal for searches that go on with one another.
        limits: those that are shown.
        has_seconds: whether a score is the seconds of a step.
    """

    name: str
    fingerprint: str
    limits: Limits
    has_seconds: bool

    @property
    def protocol(self) -> Api:
        return "runs" if self.has_seconds else "scores"

    def spec(self, space: SearchSpace, facts: Mapping[str, Any]) -> RunsSpec:
        """What the job is registered with; ``facts`` are those of the first run."""
        ranks = facts.get("ranks") or 1
        named = {name: clean(str(facts.get(name, ""))) for name in ("backend", "device")}
        return RunsSpec(
            name=self.name,
            world_size=ranks,
            ranks_per_node=(ranks,),
            knobs={setting.name: setting.domain for setting in space.settings},
            default_configuration=dict(space.settings_of(space.own)),
            fingerprint=self.fingerprint,
            limits=self.limits,
            software={name: word for name, word in named.items() if word},
        )


@dataclass(frozen=True)
class Known:
    """A run of an interrupted search. ``outcome`` is None of the one that was cut short."""

    trial: Trial
    outcome: Outcome | None


@dataclass(frozen=True)
class Interruption:
    """A search that was interrupted, as it is stored, with its runs in order."""

    job: Job
    runs: list[Known]

    @property
    def facts(self) -> Mapping[str, Any]:
        """Of its first run."""
        found: Mapping[str, Any] = self.job.data.get(FACTS, {})
        return found


def take_up(store: Store, fingerprint: str, at: float) -> Interruption | None:
    """Have an interrupted search go on from now, if there is one."""
    job = store.latest_job(protocols=RUNS, fingerprint=fingerprint)
    if job is None or job.result is not None:
        return None
    if job.ended_at is None:  # it was killed
        store.end_job(job.id, at)
    store.resume_job(job.id, at)
    seen = {index: told.values[0] for index, told in store.observations(job.id)}
    job = store.job(job.id)
    trials = store.trials(job.id)
    return Interruption(job, [Known(t, _outcome(job, t, seen.get(t.index))) for t in trials])


def closing(index: int, outcome: Outcome, at: float) -> Step:
    """What closes the trial of a run that is over."""
    if outcome.cost is not None:
        return Step(at, index, Estimate(outcome.cost, outcome.standard_error, 1))
    failure = clean(outcome.failure)
    if outcome.is_out_of_memory:
        return Step(at, index, failure=failure, is_infeasible=True)
    return Step(at, index, failure=f"{RUN_FAILED}: {failure}")


def _outcome(job: Job, trial: Trial, score: float | None) -> Outcome | None:
    if trial.is_open or trial.started_at is None or trial.ended_at is None:
        return None
    seconds = job.present_seconds(trial.started_at, trial.ended_at)
    if trial.estimate is not None:
        error = trial.estimate.standard_error
        return Outcome(score, trial.estimate.center, error, seconds=seconds)
    failure = (trial.failure or "").removeprefix(f"{RUN_FAILED}: ")
    is_short = trial.state == "infeasible"
    return Outcome(failure=failure, seconds=seconds, is_out_of_memory=is_short)

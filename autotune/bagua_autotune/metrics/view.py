"""What is read of a job for its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bagua_autotune.model.job import Job, Trial
from bagua_autotune.model.knobs import Configuration
from bagua_autotune.tuning.decision import baseline_estimate, incumbent
from bagua_autotune.tuning.objective import OBJECTIVES
from bagua_autotune.tuning.rounds import of_round
from bagua_autotune.tuning.status import speedup
from bagua_autotune.tuning.tuner import Tuner


@dataclass(frozen=True)
class Figures:
    baseline_seconds: float | None = None
    incumbent_seconds: float | None = None
    current_seconds: float | None = None
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    cost_seconds: float | None = None
    payback_steps: int | None = None
    exposed_seconds: float | None = None
    rank_spread_ratio: float | None = None
    slowest_rank: int | None = None
    slowest_share: float | None = None


@dataclass(frozen=True)
class View:
    """A job, and what it comes to."""

    job: Job
    trials: Sequence[Trial]
    figures: Figures
    configuration: Configuration
    incumbent: Configuration | None
    drifts: int
    search_steps: int

    @property
    def search_seconds(self) -> float:
        """Of all trials; of the one that runs, up to the job's last word."""
        return sum(
            max(0.0, (trial.ended_at or self.job.last_contact_at) - trial.started_at)
            for trial in self.trials
            if trial.started_at is not None
        )


def read(tuner: Tuner, job_id: str) -> View:
    """Raises UnknownJob if there is none."""
    store = tuner.store
    job, trials, status = store.job(job_id), store.trials(job_id), tuner.status(job_id)
    latest = of_round(trials, job.round)
    best, baseline = incumbent(latest), baseline_estimate(job, latest)
    objective = OBJECTIVES[job.protocol]
    ratio = job.result.speedup if job.result else None
    if ratio is None and best:
        ratio = speedup(job, latest, best, objective)
    return View(
        job=job,
        trials=trials,
        figures=Figures(
            baseline_seconds=objective.seconds(baseline.center) if baseline else None,
            incumbent_seconds=objective.seconds(best.estimate.center)
            if best and best.estimate
            else None,
            speedup=ratio,
        ),
        configuration=status.configuration,
        incumbent=best.configuration if best else None,
        drifts=sum(event.kind == "drift" for event in store.events(job_id)),
        search_steps=store.count_observations(job_id),
    )

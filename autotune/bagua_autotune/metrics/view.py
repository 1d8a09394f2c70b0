"""What is read of a job for its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bagua_autotune.model.job import Job, Trial
from bagua_autotune.model.knobs import Configuration
from bagua_autotune.overview import Figures
from bagua_autotune.overview.best import best_trial
from bagua_autotune.overview.reading import Reading
from bagua_autotune.overview.reading import read as read_job
from bagua_autotune.overview.summary import make_summary
from bagua_autotune.store import Store, digests


@dataclass(frozen=True)
class View:
    """A job, and what it comes to.

    Attributes:
        trials: of all rounds.
        configuration: what the ranks run now.
        incumbent: the best one so far; once tuned, what was kept.
        drifts: lasting changes of the step times that the ranks told of.
        search_steps: observed under trials, in all rounds.
        current_seconds: as in the figures; unknown while none of the open trial's steps are told.
    """

    job: Job
    trials: Sequence[Trial]
    figures: Figures
    configuration: Configuration
    incumbent: Configuration | None
    drifts: int
    search_steps: int
    current_seconds: float | None

    @property
    def search_seconds(self) -> float:
        """Wall time under all trials; of the one that runs, up to the job's last word."""
        return sum(
            max(0.0, (trial.ended_at or self.job.last_contact_at) - trial.started_at)
            for trial in self.trials
            if trial.started_at is not None
        )


def read(store: Store, job_id: str) -> View:
    """Raises UnknownJob if there is no such job."""
    reading = read_job(store, job_id)
    summary = make_summary(store, reading)
    best = best_trial(reading.job, reading.trials)
    return View(
        job=reading.job,
        trials=reading.trials,
        figures=summary.figures,
        configuration=summary.configuration,
        incumbent=best.configuration if best else None,
        drifts=digests.count_events(store, job_id, "drift"),
        search_steps=sum(steps.count for steps in reading.steps.values()),
        current_seconds=_current_seconds(reading, summary.figures),
    )


def _current_seconds(reading: Reading, figures: Figures) -> float | None:
    """Never of the trial before: who reads metrics pairs them with the trial's number."""
    last = reading.trials[-1] if reading.trials else None
    is_told = last is None or not last.is_open or last.index in reading.steps
    return figures.current_seconds if is_told or reading.job.is_over else None

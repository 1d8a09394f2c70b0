"""What all tunings of a job come to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from bagua_autotune.model.job import Job, TrialState
from bagua_autotune.model.knobs import Configuration
from bagua_autotune.overview.best import is_settled
from bagua_autotune.overview.reading import Reading
from bagua_autotune.overview.spent import spent
from bagua_autotune.overview.summary import Summary
from bagua_autotune.tuning.decision import failure_code


@dataclass(frozen=True)
class Totals:
    """Of all rounds, and whether the latest steps are of what runs now.

    Attributes:
        trials: how many are in each state.
        failures: how many failed, by the code of the reason.
        incumbent: the best one of the latest round; once tuned, what was kept.
        drifts: lasting changes of the step times that the ranks told of.
        search_steps, search_seconds: of all rounds, as the figures tell them of one.
        is_current: not so between a trial's begin and its first steps: the latest steps are then
            of the trial before.
    """

    trials: Mapping[TrialState, int]
    failures: Mapping[str, int]
    incumbent: Configuration | None
    drifts: int
    search_steps: int
    search_seconds: float
    is_current: bool


def make_totals(reading: Reading, summary: Summary) -> Totals:
    """Add up what was read."""
    job, trials = reading.job, reading.trials
    last = trials[-1] if trials else None
    searches = [spent(reading, number) for number in range(job.round + 1)]
    return Totals(
        trials=Counter(trial.state for trial in trials),
        failures=Counter(failure_code(trial.failure) for trial in trials if trial.failure),
        incumbent=_incumbent(job, summary),
        drifts=reading.drifts,
        search_steps=sum(search.bill.steps for search in searches),
        search_seconds=sum(search.seconds for search in searches),
        is_current=job.is_over or not last or not last.is_open or last.index in reading.steps,
    )


def _incumbent(job: Job, summary: Summary) -> Configuration | None:
    if job.result and is_settled(job):
        return job.result.configuration
    return summary.progress.incumbent

"""Where a job stands, as its ranks and its user want to know it. Reads only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bagua_autotune.model.job import Job, JobPhase, Purpose, Result, Trial, TrialState
from bagua_autotune.model.knobs import Configuration
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.tuning.confirmation import MOST_PAIRS
from bagua_autotune.tuning.decision import baseline_estimate
from bagua_autotune.tuning.objective import Objective
from bagua_autotune.tuning.rounds import began_at, of_round
from bagua_autotune.tuning.standing import best, standing


@dataclass(frozen=True)
class OpenTrial:
    """What the ranks shall run now."""

    index: int
    purpose: Purpose
    state: TrialState
    configuration: Configuration


@dataclass(frozen=True)
class Progress:
    """``max_trials`` and ``seconds_left`` are upper bounds; most searches end far below.

    Both times are as they were when the job was last heard of, if it is not finished: one whose
    ranks are gone gets no older, and one that came back is as old as it was. ``incumbent`` is the
    best configuration of the round so far and ``speedup`` what it is over the baseline, both from
    all their trials.
    """

    trials_measured: int
    max_trials: int
    elapsed_seconds: float
    seconds_left: float | None
    speedup: float | None
    incumbent: Configuration | None


@dataclass(frozen=True)
class JobStatus:
    """``configuration`` is the open trial's, or the final choice, or else the baseline.

    ``deciding``: the open trial is measured, and the next is being chosen.
    """

    id: str
    name: str
    state: JobPhase
    round: int
    deciding: bool
    trial: OpenTrial | None
    configuration: Configuration
    progress: Progress
    result: Result | None


@dataclass(frozen=True)
class TrialStatus:
    """A trial in the units of its objective; ``seconds`` are per step, with 95 % bounds.

    ``speedup``: over the first measurement of the baseline in its round, so that it stays as it is
    when the baseline is measured again.
    """

    index: int
    round: int
    purpose: Purpose
    state: TrialState
    configuration: Configuration
    steps: int
    outliers: int
    seconds: float | None
    low: float | None
    high: float | None
    speedup: float | None
    started_at: float | None
    ended_at: float | None
    failure: str | None


def job_status(
    job: Job, trials: Sequence[Trial], objective: Objective, deciding: bool
) -> JobStatus:
    last = trials[-1] if trials else None
    configuration = job.result.configuration if job.result else job.baseline
    running: OpenTrial | None = None
    if last and last.is_open and not job.is_over:
        configuration = last.configuration
        running = OpenTrial(last.index, last.purpose, last.state, configuration)
    return JobStatus(
        id=job.id,
        name=job.name,
        state=job.phase,
        round=job.round,
        deciding=deciding,
        trial=running,
        configuration=configuration,
        progress=_progress(job, trials, objective),
        result=job.result,
    )


def trial_statuses(job: Job, trials: Sequence[Trial], objective: Objective) -> list[TrialStatus]:
    baselines = {
        number: baseline_estimate(job, of_round(trials, number))
        for number in {trial.round for trial in trials}
    }
    return [_trial_status(trial, baselines[trial.round], objective) for trial in trials]


def _trial_status(trial: Trial, baseline: Estimate | None, objective: Objective) -> TrialStatus:
    found = trial.estimate
    is_bounded = found is not None and found.count > 1
    return TrialStatus(
        index=trial.index,
        round=trial.round,
        purpose=trial.purpose,
        state=trial.state,
        configuration=trial.configuration,
        steps=found.count + found.outliers if found else 0,
        outliers=found.outliers if found else 0,
        seconds=objective.seconds(found.center) if found else None,
        low=objective.seconds(found.low) if found and is_bounded else None,
        high=objective.seconds(found.high) if found and is_bounded else None,
        speedup=_speedup(found, baseline, objective),
        started_at=trial.started_at,
        ended_at=trial.ended_at,
        failure=trial.failure,
    )


def _speedup(
    found: Estimate | None, baseline: Estimate | None, objective: Objective
) -> float | None:
    """Over the baseline."""
    if found is None or baseline is None:
        return None
    return objective.speedup(baseline.center - found.center, baseline.center)


def _progress(job: Job, trials: Sequence[Trial], objective: Objective) -> Progress:
    measured = sum(trial.state == "measured" for trial in trials)
    leader = best(job, trials)
    max_trials = job.limits.max_samples + 2 * MOST_PAIRS
    end = job.finished_at or job.last_contact_at
    elapsed_seconds = job.present_seconds(began_at(job, trials), end)
    seconds_left: float | None = None
    if job.is_over:
        seconds_left = 0.0
    elif measured:
        seconds_left = elapsed_seconds / measured * _trials_left(job, trials)
    return Progress(
        trials_measured=measured,
        max_trials=max_trials,
        elapsed_seconds=elapsed_seconds,
        seconds_left=seconds_left,
        speedup=_speedup(
            leader.estimate if leader else None, standing(trials, job.baseline), objective
        ),
        incumbent=leader.configuration if leader else None,
    )


def _trials_left(job: Job, trials: Sequence[Trial]) -> int:
    """The most trials that can still follow."""
    closed = [trial for trial in trials if not trial.is_open]
    confirming = sum(trial.purpose == "confirm" for trial in closed)
    searching = 0
    if job.phase == "tuning":
        searching = job.limits.max_samples - (len(closed) - confirming)
    return max(0, searching) + max(0, 2 * MOST_PAIRS - confirming)

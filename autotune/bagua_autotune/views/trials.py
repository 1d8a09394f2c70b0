"""The trials of a job, each with how fast it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from bagua_autotune.measuring.ceiling import Ceiling
from bagua_autotune.measuring.rounds import Round
from bagua_autotune.measuring.standing import best_trial
from bagua_autotune.model import job as records
from bagua_autotune.model.job import Job, Purpose, TrialState
from bagua_autotune.model.knobs import ConfigurationField
from bagua_autotune.model.view import Moment, View
from bagua_autotune.views.reading import Reading
from bagua_wire.words import describe


class TrialView(View):
    """``seconds`` per step with its 95 % interval; null where there is none (yet).

    ``speedup``: of this trial alone, over the default measured beside it, which is on the line
    between the default's trials before and after it, or else its nearest one; 1 of the default;
    null where it is more than is possible, see Figures.ceiling.
    ``failure``: why it failed or is infeasible. ``peak_bytes``: the memory that it took on the
    fullest rank, or would take if it is infeasible, of ``device_bytes``; null where the ranks do
    not tell.
    """

    index: int
    round: int
    purpose: Purpose
    state: TrialState
    configuration: ConfigurationField
    steps: int
    outliers: int
    seconds: float | None
    low: float | None
    high: float | None
    speedup: float | None
    started_at: Moment | None
    ended_at: Moment | None
    failure: str | None
    peak_bytes: int | None
    device_bytes: int | None


class ShownTrial(TrialView):
    """``is_best``: the first trial of what was kept, or else of the best configuration so far.

    ``words``: its configuration. ``is_noise``: its speed-up is not told, as it is more than hiding
    all communication would give.
    """

    words: str
    is_best: bool
    is_noise: bool = False


def trial_views(
    job: Job, trials: Sequence[records.Trial], ceilings: Mapping[int, Ceiling | None]
) -> list[TrialView]:
    """Return the trials as views, in the same order.

    Args:
        trials: of all rounds.
        ceilings: of the rounds, by their numbers.
    """
    rounds = [
        replace(Round.of(job, trials, number), ceiling=ceilings.get(number))
        for number in range(job.round + 1)
    ]
    return [_view(rounds[trial.round], trial) for trial in trials]


def shown_trials(reading: Reading) -> list[ShownTrial]:
    """The same, and which of them is the best, and which too good to be true."""
    best = best_trial(reading.shown)
    return [
        ShownTrial(
            **vars(view),
            words=describe(view.configuration),
            is_best=best is not None and view.index == best.index,
            is_noise=bool(view.speedup is None and view.steps and reading.ceilings.get(view.round)),
        )
        for view in trial_views(reading.job, reading.trials, reading.ceilings)
    ]


def _view(round_: Round, trial: records.Trial) -> TrialView:
    objective, found = round_.objective, trial.estimate
    is_bounded = found is not None and found.count > 1
    compared = round_.defaults.compare([trial])
    faster = round_.believable(compared.speedup(objective)) if compared else None
    return TrialView(
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
        speedup=faster.center if faster else None,
        started_at=trial.started_at,
        ended_at=trial.ended_at,
        failure=trial.failure,
        peak_bytes=trial.memory.peak_bytes if trial.memory else None,
        device_bytes=trial.memory.device_bytes if trial.memory else None,
    )

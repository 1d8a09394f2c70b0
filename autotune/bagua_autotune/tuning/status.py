"""What a job's ranks report, checked against the job, and what they are told: what they shall run,
and how far the tuning is."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from bagua_autotune.deciding.ending import MOST_TRIALS
from bagua_autotune.deciding.next_step import step_cost
from bagua_autotune.measuring.against_default import OBJECTIVES
from bagua_autotune.measuring.rounds import Ceiling, Round
from bagua_autotune.measuring.standing import best_configuration, speedup
from bagua_autotune.model.job import (
    RUNS,
    Job,
    Observation,
    Purpose,
    Result,
    Saved,
    Trial,
    TrialState,
)
from bagua_autotune.model.knobs import ConfigurationField
from bagua_autotune.model.view import View
from bagua_autotune.store.observations import Steps
from bagua_wire.messages import JobPhase

OF_BAGUA = "The job belongs to /api/v1; only Bagua's own workers report to it."
OF_RUNS = "The job is a search of `bagua-autotune system`, which has no ranks that report."


class WrongStep(Exception):
    """A step does not have exactly one value of each rank, or a profile of each tensor."""


class OtherProtocol(Exception):
    """The job is one of a protocol whose ranks report in another way; says which."""


def check_protocol(job: Job) -> None:
    """Raise OtherProtocol if the job's ranks do not report like this."""
    if not OBJECTIVES[job.protocol].closes_itself:
        if job.protocol in RUNS:
            raise OtherProtocol(OF_RUNS)
        raise OtherProtocol(OF_BAGUA)


def weigh(observations: Sequence[Observation], job: Job, trial: Trial) -> list[float]:
    """What each of the steps cost; OtherProtocol or WrongStep if they cannot be the job's."""
    check_protocol(job)
    for observation in observations:
        for told in (observation.values, observation.compute):
            if told is not None and len(told) != job.world_size:
                raise WrongStep(
                    f"step {observation.step} has {len(told)} values, "
                    f"the world size is {job.world_size}"
                )
    return [step_cost(job, trial, observation) for observation in observations]


def saved_until(
    job: Job, step: int, step_seconds: float, observed: Collection[Steps]
) -> Saved | None:
    """What was saved since the job's steps were last counted; None if nothing is to be counted.
    Only confirmed gains count, and only steps that its ranks told of.

    Each step since then, or since the last trial, would have taken ``step_seconds`` times the
    confirmed speed-up under the default. While a job is being tuned nothing is saved: its steps
    are part of what the search costs.

    Args:
        step: the last one that was made.
        step_seconds: what a step takes now.
        observed: the steps of all its trials.
    """
    counted = max([job.saved.step, *(steps.last for steps in observed)])
    if job.phase != "finished" or job.result is None or step <= counted:
        return None
    return Saved(step, (step - counted) * step_seconds * (job.result.speedup - 1))


class OpenTrial(View):
    """The trial that the ranks shall run now."""

    index: int
    purpose: Purpose
    state: TrialState
    configuration: ConfigurationField


class Progress(View):
    """How far the tuning is. ``max_trials`` and ``seconds_left`` are upper bounds; most searches
    end far below.

    ``max_trials`` is the limit that was set (``BAGUA_AUTOTUNE_MAX_SAMPLES``): ``search_trials``,
    those that were begun, count towards it; what was not tried, as it would not fit, does not. What
    the search found and the default are then measured again, in at most
    ``max_confirming_trials``. ``trials_measured``: of both kinds.

    Both times are as they were when the job was last heard of, if it is not finished: one whose
    ranks are gone gets no older, and one that came back is as old as it was. ``incumbent`` is the
    best configuration so far, or what was kept, and ``speedup`` what it is over the default; null
    where that is more than is possible.
    """

    trials_measured: int
    max_trials: int
    search_trials: int
    confirming_trials: int
    max_confirming_trials: int
    elapsed_seconds: float
    seconds_left: float | None
    speedup: float | None
    incumbent: ConfigurationField | None


class JobState(View):
    """What all ranks shall run now, and how far tuning is.

    ``configuration`` is the open trial's, or the final choice, or else the default. ``deciding``:
    the open trial is measured and the next is being chosen; ask again shortly. ``round`` counts
    the tunings: 0 is the first, another one follows each lasting change.
    """

    id: str
    name: str
    state: JobPhase
    round: int
    deciding: bool
    trial: OpenTrial | None
    configuration: ConfigurationField
    progress: Progress
    result: Result | None

    @property
    def phase_trials(self) -> tuple[int, int]:
        """Trials that were begun in the phase that runs, and at most how many it has."""
        progress = self.progress
        if self.state == "confirming":
            return progress.confirming_trials, progress.max_confirming_trials
        return progress.search_trials, progress.max_trials


def job_state(
    job: Job, trials: Sequence[Trial], ceiling: Ceiling | None = None, deciding: bool = False
) -> JobState:
    """Return where the job stands.

    Args:
        trials: of all rounds.
        ceiling: of the round that is shown.
        deciding: whether the next trial is being chosen.
    """
    last = trials[-1] if trials else None
    configuration = job.result.configuration if job.result else job.baseline
    running: OpenTrial | None = None
    if last and last.is_open and last.round == job.round and not job.is_over:
        configuration = last.configuration
        running = OpenTrial(
            index=last.index, purpose=last.purpose, state=last.state, configuration=configuration
        )
    return JobState(
        id=job.id,
        name=job.name,
        state=job.phase,
        round=job.round,
        deciding=deciding,
        trial=running,
        configuration=configuration,
        progress=_progress(job, trials, ceiling),
        result=job.result,
    )


def _progress(job: Job, trials: Sequence[Trial], ceiling: Ceiling | None) -> Progress:
    current = Round.of(job, trials)
    shown = replace(Round.shown(job, trials), ceiling=ceiling)
    measured = sum(trial.state == "measured" for trial in current.trials)
    end = job.finished_at or job.last_contact_at
    elapsed_seconds = job.present_seconds(current.began_at, end)
    seconds_left: float | None = None
    if job.is_over:
        seconds_left = 0.0
    elif measured:
        searching, confirming = _trials_left(current)
        left = elapsed_seconds / measured * (searching + confirming)
        seconds_left = min(left, max(0.0, current.most_seconds - elapsed_seconds))
    faster = speedup(shown)
    confirming_trials = len(current.trials) - len(current.searched)
    return Progress(
        trials_measured=measured,
        max_trials=job.limits.max_samples,
        search_trials=sum(trial.was_tried for trial in current.searched),
        confirming_trials=confirming_trials,
        max_confirming_trials=MOST_TRIALS,
        elapsed_seconds=elapsed_seconds,
        seconds_left=seconds_left,
        speedup=faster.center if faster else None,
        incumbent=best_configuration(shown),
    )


def _trials_left(round_: Round) -> tuple[int, int]:
    """The most trials that can still follow, of the search and confirming ones."""
    job = round_.job
    closed = [trial for trial in round_.trials if not trial.is_open and trial.was_tried]
    confirming = sum(trial.purpose == "confirm" for trial in closed)
    searching = 0
    if job.phase == "tuning":
        searching = job.limits.max_samples - (len(closed) - confirming)
    return max(0, searching), max(0, MOST_TRIALS - confirming)

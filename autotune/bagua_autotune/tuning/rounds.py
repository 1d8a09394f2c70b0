"""The rounds of a job: it is tuned again after a lasting change of its step times."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from bagua_autotune.model.job import Job, Limits, Trial
from bagua_autotune.model.knobs import Configuration
from bagua_autotune.model.text import describe_count
from bagua_autotune.store import Steps

# From the second time on a job trains for so many steps before it is tuned again, twice as many
# after each round: a machine that changes all the time is not worth following.
FIRST_PAUSE_STEPS = 100
# From one trial to the next it is usually so many; of few trials nobody can tell.
TRIAL_STEPS = 16
FEWEST_TRIALS = 4


def of_round(trials: Sequence[Trial], number: int) -> list[Trial]:
    """The trials of one round."""
    return [trial for trial in trials if trial.round == number]


def stored_best(job: Job) -> Configuration | None:
    """What this round begins with: the best of an earlier run, or of the round before."""
    if job.round > 0 and job.result:
        return job.result.configuration
    if job.inherited and job.inherited.configuration is not None:
        return Configuration(job.inherited.configuration)
    return None


def as_of_now(job: Job, trials: Sequence[Trial], observed: Collection[Steps]) -> Limits:
    """The job's limits, its remaining steps less those that it made since it was registered. A
    training that outlives what was expected of it is expected to run as long again. When the time
    is up there are as many samples as were taken.

    Args:
        trials: of this round.
        observed: the steps of all its trials.
    """
    changes = {}
    if observed:
        made = max(steps.last for steps in observed) - min(steps.first for steps in observed)
        changes["remaining_steps"] = job.limits.remaining_steps - made % job.limits.remaining_steps
    if time_is_up(job, trials):
        changes["max_samples"] = sum(trial.purpose == "search" for trial in trials)
    return job.limits.model_copy(update=changes)


def time_is_up(job: Job, trials: Sequence[Trial]) -> bool:
    """Whether the search of a round took all the time that it may.

    Args:
        trials: of the round.
    """
    most = job.limits.max_seconds
    searched = [trial for trial in trials if trial.purpose == "search"]
    return most is not None and search_seconds(job, searched) >= most


def trial_steps(trials: Sequence[Trial], observed: Mapping[int, Steps]) -> float:
    """How many steps of the training lay between the first steps of two trials, on average.

    Args:
        trials: of a round.
        observed: the steps of all trials, by their index.
    """
    first_steps = [observed[trial.index].first for trial in trials if trial.index in observed]
    if len(first_steps) < FEWEST_TRIALS:
        return TRIAL_STEPS
    return (first_steps[-1] - first_steps[1]) / (len(first_steps) - 2)


def refusal(job: Job, steps_since: int | None) -> str | None:
    """Why no new round is opened; None if one is.

    Args:
        job: finished.
        steps_since: steps that it trained since its last trial, where that is known.
    """
    if job.round + 1 >= job.limits.max_rounds:
        return f"it has been tuned {job.limits.max_rounds} times, which is the limit"
    if job.round == 0 or steps_since is None:
        return None
    pause = FIRST_PAUSE_STEPS * 2 ** (job.round - 1)
    if steps_since < pause:
        return f"it was tuned {describe_count(steps_since, 'step')} ago, less than {pause}"
    return None


def began_at(job: Job, trials: Sequence[Trial]) -> float:
    """When the round's first trial began, in seconds since the epoch.

    Args:
        trials: of the round.
    """
    starts = [trial.started_at for trial in trials if trial.started_at is not None]
    return min(starts, default=job.last_contact_at)


def search_seconds(job: Job, trials: Sequence[Trial]) -> float:
    """Wall time from a round's first trial to the end of its last; while one is open, up to the
    job's last word. Without the time in which the job was lost.

    Args:
        trials: of the round.
    """
    last_word = job.last_contact_at
    ends = [last_word if trial.is_open else trial.ended_at or last_word for trial in trials]
    return job.present_seconds(began_at(job, trials), max(ends)) if ends else 0.0

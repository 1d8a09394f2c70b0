"""Whether a job is tuned again after a change of its step times, and what all of that may cost.

Apart from what decides inside a round: this looks at all rounds of a job at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bagua_autotune.deciding.result import bill
from bagua_autotune.measuring.rounds import Round
from bagua_autotune.model.job import Job, Trial
from bagua_autotune.store.observations import Steps

# All rounds after the first together cost at most so many steps, and this share of those that the
# training made: a machine that changes all the time is not worth following.
FREE_STEPS, COST_SHARE = 20.0, 0.02


def spent_steps(
    job: Job,
    trials: Sequence[Trial],
    observed: Mapping[int, Steps],
    switch_seconds: Mapping[int, float],
) -> float:
    """What the rounds after the first have cost so far.

    Args:
        trials: of all rounds.
        observed: by trial index the steps observed under it.
        switch_seconds: by trial index how long the ranks took to cut their buckets.
    """
    rounds = (Round.of(job, trials, number) for number in range(1, job.round + 1))
    return sum(bill(each, observed, switch_seconds).cost_steps for each in rounds)


def allowed_steps(observed: Mapping[int, Steps], until: int | None = None) -> float:
    """What they may cost in all.

    Args:
        until: the training's step; None: the last one that was observed.
    """
    if not observed:
        return FREE_STEPS
    last = max(steps.last for steps in observed.values())
    made = max(last, until or 0) - min(steps.first for steps in observed.values())
    return FREE_STEPS + COST_SHARE * made


def refusal(job: Job, spent: float, allowed: float) -> str | None:
    """Why no new round is opened; None if one is. Steps that became faster are as good a reason as
    slower ones: on a faster network what was kept may be slower than the default.

    Args:
        job: finished.
        spent, allowed: see ``spent_steps`` and ``allowed_steps``.
    """
    if job.round + 1 >= job.limits.max_rounds:
        return f"it has been tuned {job.limits.max_rounds} times, which is the limit"
    next_one = spent / max(1, job.round)
    if spent + next_one > allowed:
        return (
            f"that has cost {spent:.3g} steps so far, and with another round may cost "
            f"{allowed:.3g} at most"
        )
    return None

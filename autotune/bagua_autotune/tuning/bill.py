"""What a search cost the training, and after how many steps that is earned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bagua_autotune.model.job import Trial
from bagua_autotune.store import Steps
from bagua_autotune.tuning.objective import Objective


@dataclass(frozen=True)
class Bill:
    """``steps`` ran from the first trial to the last; only time beyond the baseline's is cost.

    Of jobs that report the speed of many steps at once, ``steps`` are those between their reports.
    """

    steps: int
    cost_seconds: float
    cost_steps: float

    def payback_steps(self, speedup: float) -> int | None:
        """After how many steps at this speed-up the cost is earned; None if never."""
        if speedup <= 1:
            return None
        saved_share = 1 - 1 / speedup
        return math.ceil(self.cost_steps / saved_share)


def bill(
    trials: Sequence[Trial],
    observed: Mapping[int, Steps],
    switch_seconds: Mapping[int, float],
    baseline_cost: float | None,
    objective: Objective,
) -> Bill:
    """Add up a round.

    Args:
        trials: of the round; an open one's steps count, and cost once it is closed.
        observed: by trial index the steps observed under it.
        switch_seconds: by trial index how long the ranks took to cut their buckets.
        baseline_cost: of a step.
        objective: what costs mean; without seconds nothing can be added up.
    """
    baseline_seconds = None if baseline_cost is None else objective.seconds(baseline_cost)
    ran = [trial for trial in trials if trial.index in observed]
    are_single = objective.seconds(0.0) is not None
    steps = 0
    seconds = 0.0
    for place, trial in enumerate(ran):
        own = observed[trial.index]
        count = own.count if are_single else own.last - own.first
        if place + 1 < len(ran):
            # A trial's steps run until the next one's begin: those dropped at the switch count too.
            count = max(count, observed[ran[place + 1].index].first - own.first)
        steps += count
        own_seconds = objective.seconds(trial.estimate.center) if trial.estimate else None
        if own_seconds is not None and baseline_seconds is not None:
            seconds += count * max(0.0, own_seconds - baseline_seconds)
    seconds += sum(switch_seconds.get(trial.index, 0.0) for trial in trials)
    return Bill(steps, seconds, seconds / baseline_seconds if baseline_seconds else 0.0)

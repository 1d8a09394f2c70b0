"""When a trial has been measured well enough, from nothing but what was observed of it.

No clock is read: the time a trial took is the sum of its step times, so the same
observations always close it at the same step, after a restart as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from statistics import median

from bagua_autotune.model.job import Limits, Purpose
from bagua_autotune.model.statistics import Estimate, estimate

# Looking again after each batch until the interval is narrow favours intervals that are too
# narrow; a spread known from several steps makes up for it: 93 to 97 % hold the truth at 0.5 to
# 5 % noise (tests/autotune/measuring/test_trial_end.py measures it).
NARROW = 0.025
NARROW_STEPS = 6
# Of fewer steps, none of them an outlier, the interval must be narrower by these factors: a quiet
# machine needs no more.
NARROWER = {3: 0.25, 4: 0.5, 5: 0.75}
# An interval is narrow, too, if it is so small a part of the difference that it is to show.
NARROW_SHARE = 0.25
# A search trial is one of several points of a curve, and may be repeated; what switching to it
# took is spent.  A confirming one stands for itself.
MOST_STEPS: dict[Purpose, int] = {"search": 7, "confirm": 10}
CLEARLY_WORSE = 0.05
FEWEST_STEPS = 3
# Every step that much slower than the best so far: no noise, and no need to wait for a third.
FAR_WORSE = 0.5
FEWEST_STEPS_FAR_WORSE = 2
# Connections that were idle begin slowly, beyond the steps that the ranks drop after a switch.
# First steps that are so much slower than all of the later half do not count, and while the last
# step is so much faster than all before it nobody can tell yet how slow the configuration is.
SETTLING = 0.05
FEWEST_TO_SETTLE = 6
SETTLED = 0.1
SETTLED_STEPS = 5


def warmup_steps(seconds: Sequence[float], warmup_seconds: float) -> int | None:
    """How many of a job's first steps do not count, or None while it is still warming up.

    The job is warm once the median of five steps is within 10 % of that of the five before,
    or after ``warmup_seconds``.
    """
    if warmup_seconds == 0:
        return 0
    for count, elapsed in enumerate(accumulate(seconds), start=1):
        if elapsed >= warmup_seconds:
            return count
        if count >= 2 * SETTLED_STEPS:
            last = median(seconds[count - SETTLED_STEPS : count])
            before = median(seconds[count - 2 * SETTLED_STEPS : count - SETTLED_STEPS])
            if abs(last - before) <= SETTLED * before:
                return count
    return None


def measured(
    costs: Sequence[float],
    seconds: Sequence[float],
    limits: Limits,
    purpose: Purpose,
    rival: Estimate | None = None,
    scale: float = 1.0,
) -> Estimate | None:
    """The trial's estimate if it is good enough to close the trial, else None.

    Args:
        costs: of the steps that count, in order.
        seconds: how long each took.
        limits: ``trial_seconds`` bounds the trial.
        purpose: of the trial.
        rival: what it is compared with: a search trial with the best so far, and one that is
            clearly worse is closed early; a confirming one with the other side.
        scale: the difference of costs that is 100 %.
    """
    if len(costs) < FEWEST_STEPS_FAR_WORSE:
        return None
    is_falling = costs[-1] < min(costs[:-1]) - SETTLING * scale
    first = _settled_from(costs, SETTLING * scale)
    costs, seconds = costs[first:], seconds[first:]
    found = estimate(costs)
    # A confirming trial is measured to the end: stopping it early would favour one side.
    incumbent = rival if purpose == "search" and not is_falling else None
    if incumbent is not None and min(costs) > incumbent.center + FAR_WORSE * scale:
        return found
    if found.count < FEWEST_STEPS:
        return None
    if sum(seconds) >= limits.trial_seconds or found.count >= MOST_STEPS[purpose]:
        return found
    narrow = NARROW * scale
    if rival is not None:
        narrow = max(narrow, NARROW_SHARE * abs(found.center - rival.center))
    if found.count >= NARROW_STEPS and found.half_width <= narrow:
        return found
    quiet = purpose == "search" and not found.outliers
    if quiet and found.half_width <= NARROWER.get(found.count, 0.0) * NARROW * scale:
        return found
    if incumbent is not None and found.low > incumbent.high + CLEARLY_WORSE * scale:
        return found
    return None


def _settled_from(costs: Sequence[float], margin: float) -> int:
    """Return how many first steps are slower than all of the later half, by the margin and by more
    than that half differs; less than half. Of few steps nothing can be told.
    """
    if len(costs) < FEWEST_TO_SETTLE:
        return 0
    half = len(costs) // 2
    slowest = max(costs[half:])
    limit = slowest + max(margin, slowest - min(costs[half:]))
    return next((place for place in range(half) if costs[place] <= limit), half)

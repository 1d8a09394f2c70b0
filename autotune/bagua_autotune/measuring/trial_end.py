"""When a trial has been measured well enough, from nothing but what was observed of it.

No clock is read: the time a trial took is the sum of its step times, so the same
observations always close it at the same step, after a restart as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, groupby
from statistics import fmean, median

from bagua_autotune.measuring.visits import BAD_MOMENT, Visits
from bagua_autotune.model.job import Limits, Purpose
from bagua_autotune.model.statistics import OUTLIER_SPREADS, Estimate, estimate

# The default comes first, and shows what steps differ by: that takes so many at least.
FEWEST_OF_FIRST = 6
# A trial is known well enough if its own error is at most so many times what visits differ by: more
# steps of the same visit teach little. Steps that come after it was closed count as well.
OWN_SHARE = 1.5
# Or if it is so small a part of the difference that it is to show.
SHOWN_SHARE = 0.12
# A search trial is one of several points of a curve, and may be repeated; what switching to it
# took is spent.  A confirming one stands for itself.
FEWEST_STEPS: dict[Purpose, int] = {"search": 1, "confirm": 2}
MOST_STEPS: dict[Purpose, int] = {"search": 7, "confirm": 10}
CLEARLY_WORSE, SURELY = 0.05, 2.0
# Connections that were idle begin slowly, beyond the steps that the ranks drop after a switch.
# First steps that are so much slower than all of the later half do not count, and while the last
# step is so much faster than all before it nobody can tell yet how slow the configuration is.
SETTLING = 0.05
FEWEST_TO_SETTLE = 6
# A bad moment inside a visit: on average so many steps in succession are slow, and elsewhere so
# many in succession are fast.
FEWEST_BAD, FEWEST_FAST = 2, 3
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
    visits: Visits | None = None,
) -> Estimate | None:
    """The trial's estimate if it is good enough to close the trial, else None.

    Args:
        costs: of the steps that count, in order.
        seconds: how long each took.
        limits: ``trial_seconds`` bounds the trial.
        purpose: of the trial.
        rival: what it is compared with: a search trial with the best so far, and one that is
            clearly worse is closed early; a confirming one with the other side.
        visits: those before; None: it is the first one, of the default.
    """
    if not costs:
        return None
    scale = visits.scale if visits else 1.0
    is_falling = len(costs) > 1 and costs[-1] < min(costs[:-1]) - SETTLING * scale
    found = settled(costs, visits)
    fewest = FEWEST_STEPS[purpose] if visits else FEWEST_OF_FIRST
    if found.count + found.outliers >= MOST_STEPS[purpose]:
        return found
    if sum(seconds) >= limits.trial_seconds and found.count >= 2:
        return found
    if found.count < fewest or is_falling:
        return None
    if visits is None:
        return found
    error = visits.error_inside(found)
    apart = abs(found.center - rival.center) if rival else 0.0
    if error <= SHOWN_SHARE * apart or error <= OWN_SHARE * visits.visit_error:
        return found
    # A confirming trial is measured to the end: stopping it early would favour one side.
    if purpose == "search" and rival is not None:
        worse = found.center - rival.center - CLEARLY_WORSE * scale
        return found if worse > SURELY * math.hypot(error, visits.error(rival)) else None
    return None


def settled(costs: Sequence[float], visits: Visits | None = None) -> Estimate:
    """Estimate from the steps of a trial, without first ones in which it had not settled."""
    scale, usual_spread = (visits.scale, visits.step_spread) if visits else (1.0, 0.0)
    costs = _without_bad_moment(costs, max(BAD_MOMENT * scale, OUTLIER_SPREADS * usual_spread))
    return estimate(costs[_settled_from(costs, SETTLING * scale) :], usual_spread)


def _without_bad_moment(costs: Sequence[float], margin: float) -> Sequence[float]:
    """The steps without those in which something else made all slow for a while: nothing makes
    several steps in succession fast by accident. What alternates between fast and slow is slow.
    """
    if len(costs) <= FEWEST_FAST:
        return costs
    windows = (costs[at : at + FEWEST_FAST] for at in range(len(costs) - FEWEST_FAST + 1))
    limit = min(max(window) for window in windows) + margin
    lasted = [len(list(run)) for is_slow, run in groupby(costs, lambda c: c > limit) if is_slow]
    if not lasted or fmean(lasted) < FEWEST_BAD:
        return costs
    return [cost for cost in costs if cost <= limit]


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

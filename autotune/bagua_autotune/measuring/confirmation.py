"""What a confirmation can show, and what an earlier run's has shown.

The winner of a search is partly the luckiest one, so it and the default are measured again before
it is kept; see ``deciding/decision.py``. What was best in an earlier run of the same job was
confirmed there: one trial says whether it still is.
"""

from __future__ import annotations

import math

from bagua_autotune.measuring.rounds import Round
from bagua_autotune.measuring.trial_end import MOST_STEPS
from bagua_autotune.measuring.visits import Visits
from bagua_autotune.model.statistics import MEDIAN_INEFFICIENCY, Estimate, Interval

# Of a confirmation, about half of them the default's.
MOST_TRIALS = 12
# What is less is not worth another trial.
GAIN_THAT_MATTERS = 0.01
# By what the gain of one run differs from that of another, as a share of the gain, and at least.
GAIN_VARIES = 0.3
GAIN_VARIES_AT_LEAST = 0.01
# A gain of so many standard errors of the two sides alone is shown in four of five usual intervals:
# 1.96 for one without zero, 0.84 so that 80 % have none (Cohen, "Statistical power analysis", ch.
# 2). What is claimed asks for more, and rests on more.
SHOWN_ERRORS = 2.8


def least_shown(visits: Visits) -> float:
    """The smallest gain that a confirmation of full length mostly shows, and that matters."""
    steps = MOST_STEPS["confirm"]
    inside = MEDIAN_INEFFICIENCY * visits.step_spread / math.sqrt(steps)
    error = visits.error(Estimate(0.0, inside, steps)) * math.sqrt(4 / MOST_TRIALS)
    return max(GAIN_THAT_MATTERS * visits.scale, SHOWN_ERRORS * error)


def confirmed_gain(round_: Round, baseline: Estimate, stored: Estimate) -> Interval | None:
    """The gain of the stored best over the default, or None if it is not what it was.

    Two short trials say little by themselves; together with the gain of the earlier run, which
    was confirmed at length, they say whether that still holds (the usual weighted mean of two
    measurements).
    """
    inherited = round_.job.inherited
    if round_.number > 0 or inherited is None or inherited.gain is None:
        return None
    scale = round_.scale
    expected = inherited.gain * scale
    measured = baseline.center - stored.center
    error = math.hypot(*(e.half_width / 1.96 for e in (baseline, stored)))
    spread = max(GAIN_VARIES * expected, GAIN_VARIES_AT_LEAST * scale)
    if not math.isfinite(error) or abs(measured - expected) > 1.96 * math.hypot(error, spread):
        return None
    weight = spread**2 / (spread**2 + error**2)
    center = weight * measured + (1 - weight) * expected
    half_width = 1.96 * error * math.sqrt(weight)
    return Interval(center, center - half_width, center + half_width)

"""What differs between visits of one configuration, learned from what was visited more than once;
and when a visit has been measured well enough, from nothing but what was observed of it.

A visit are the steps between two switches, those of a trial. The same configuration takes longer at
one visit than at another, by more than the spread inside a visit shows: memory lies elsewhere,
other jobs come and go. So a visit is a sample with an error of its own, however many steps it has.

No clock is read: the time a trial took is the sum of its step times, so the same observations
always close it at the same step, after a restart as well.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, groupby
from statistics import fmean, median

from bagua_autotune.model.job import Limits, Purpose, Trial
from bagua_autotune.model.statistics import Estimate, estimate
from bagua_wire.configuration import Configuration
from bagua_wire.knobs import CHANNELS_KNOB

# A guess of what visits differ by, as a part of the default's cost, and of how many visits more it
# is worth: few say little.
USUAL_VISIT_ERROR, PRIOR_VISITS = 0.015, 3
# Of the spread of steps inside a visit, before one is known; as many steps' worth says what a visit
# of few steps does not know of its own: with 3, the intervals of trials that close themselves held
# the truth in 91 %.
USUAL_STEP_SPREAD, PRIOR_STEPS = 0.03, 6
FEWEST_FOR_SPREAD = 3
# A visit was in a bad moment if another one of the same configuration was so much faster, and by so
# many standard errors: links of two hosts were seen at half their speed for some seconds.
BAD_MOMENT, BAD_MOMENT_ERRORS = 0.3, 5.0


class Visits:
    """Trials of a round, and what their visits say together; each is worked out once, when it is
    asked for.

    Args:
        trials: they do not change any more.
        scale: the difference of costs that is 100 %.
    """

    def __init__(self, trials: Sequence[Trial], scale: float = 1.0) -> None:
        self.trials = trials
        self.scale = scale

    @cached_property
    def step_spread(self) -> float:
        """The standard deviation between steps of a typical visit: a pause in one of them says
        nothing of the others."""
        known = [spread for _, spread in self._spreads]
        return median(known) if known else USUAL_STEP_SPREAD * self.scale

    def spread_like(self, configuration: Configuration | None) -> float:
        """That of a typical visit to what has as many channels, or half or twice as many: cores
        that are full make steps slow in turns. At least that of a typical visit to anything, which
        it is where the configuration is None."""
        own = 0 if configuration is None else _channels(configuration)
        like = [s for channels, s in self._spreads if channels <= 2 * own and own <= 2 * channels]
        return max(self.step_spread, median(like)) if like else self.step_spread

    @cached_property
    def _spreads(self) -> list[tuple[int, float]]:
        """Of each visit with enough steps, after its number of channels."""
        return [
            (_channels(trial.configuration), _spread(trial.estimate))
            for trial in self.trials
            if trial.estimate and trial.estimate.count >= FEWEST_FOR_SPREAD
        ]

    @cached_property
    def visit_error(self) -> float:
        """That between visits of one configuration."""
        usual = USUAL_VISIT_ERROR * self.scale
        squares, degrees = PRIOR_VISITS * usual**2, float(PRIOR_VISITS)
        for configuration, visited in self._repeated.items():
            own = [each for index, each in visited if index not in self.in_bad_moments]
            centers = [e.center - own[0].center for e in own]
            inside = fmean(self.error_inside(e, configuration) ** 2 for e in own)
            beyond = sum((c - fmean(centers)) ** 2 for c in centers) - (len(own) - 1) * inside
            squares, degrees = squares + max(0.0, beyond), degrees + len(own) - 1
        return math.sqrt(squares / degrees)

    def error_inside(self, found: Estimate, configuration: Configuration | None = None) -> float:
        """The standard error of a visit's centre by the spread of its steps; of few steps mostly
        by that of others to what is like the configuration."""
        own = _spread(found) ** 2 if found.count > 1 else 0.0
        degrees = max(0, found.count - 1)
        squares = degrees * own + PRIOR_STEPS * self.spread_like(configuration) ** 2
        spread = math.sqrt(squares / (degrees + PRIOR_STEPS))
        return spread / math.sqrt(max(found.count, 1))

    def error(self, found: Estimate, configuration: Configuration | None = None) -> float:
        """The standard error of a visit as a measurement of its configuration."""
        return math.hypot(self.error_inside(found, configuration), self.visit_error)

    @cached_property
    def undisturbed(self) -> list[Trial]:
        """Those that were not in a bad moment."""
        return [trial for trial in self.trials if trial.index not in self.in_bad_moments]

    @cached_property
    def in_bad_moments(self) -> set[int]:
        """The indices of trials that something else made slow: their configuration was far faster
        at another visit. Nothing makes a step faster by accident; but what is slow more often than
        not is slow."""
        found: set[int] = set()
        for configuration, own in self._repeated.items():
            errors = BAD_MOMENT_ERRORS * self.spread_like(configuration)
            fastest = min((each for _, each in own), key=lambda each: each.center)
            limit = fastest.center + BAD_MOMENT * self.scale
            slow = {
                index
                for index, each in own
                if each.center > limit + errors * math.sqrt(1 / each.count + 1 / fastest.count)
            }
            if len(slow) <= len(own) - len(slow):
                found |= slow
        return found

    @cached_property
    def _repeated(self) -> dict[Configuration, list[tuple[int, Estimate]]]:
        """The measurements of each configuration that has several, with their trials' indices."""
        grouped: defaultdict[Configuration, list[tuple[int, Estimate]]] = defaultdict(list)
        for trial in self.trials:
            if trial.estimate:
                grouped[trial.configuration].append((trial.index, trial.estimate))
        return {each: own for each, own in grouped.items() if len(own) > 1}


def _channels(configuration: Configuration) -> int:
    channels = configuration.get(CHANNELS_KNOB, 1)
    return channels if isinstance(channels, int) else 1


def _spread(found: Estimate) -> float:
    return found.standard_error * math.sqrt(found.count)


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
# They are slower by so many of the spreads of such visits at least.
BAD_SPREADS = 6.0
SETTLED = 0.1
SETTLED_STEPS = 5


def warmup_steps(seconds: Sequence[float], warmup_seconds: float) -> int | None:
    """How many of a job's first steps do not count, or None while it is still warming up.

    The job is warm once the median of five steps is within 10 % of that of the five before; where
    it is within 5 %, these five count already. Or it is after ``warmup_seconds``.
    """
    if warmup_seconds == 0:
        return 0
    for count, elapsed in enumerate(accumulate(seconds), start=1):
        if elapsed >= warmup_seconds:
            return count
        if count >= 2 * SETTLED_STEPS:
            last = median(seconds[count - SETTLED_STEPS : count])
            before = median(seconds[count - 2 * SETTLED_STEPS : count - SETTLED_STEPS])
            change = abs(last - before)
            if change <= SETTLED * before:
                return count - SETTLED_STEPS if change <= SETTLING * before else count
    return None


def measured(
    costs: Sequence[float],
    seconds: Sequence[float],
    limits: Limits,
    purpose: Purpose,
    rival: Estimate | None = None,
    visits: Visits | None = None,
    configuration: Configuration | None = None,
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
        configuration: the trial's; None: it is not known.
    """
    if not costs:
        return None
    scale = visits.scale if visits else 1.0
    is_falling = len(costs) > 1 and costs[-1] < min(costs[:-1]) - SETTLING * scale
    found = settled(costs, visits, configuration)
    fewest = FEWEST_STEPS[purpose] if visits else FEWEST_OF_FIRST
    if found.count + found.outliers >= MOST_STEPS[purpose]:
        return found
    if sum(seconds) >= limits.trial_seconds and found.count >= 2:
        return found
    if found.count < fewest or is_falling:
        return None
    if visits is None:
        return found
    error = visits.error_inside(found, configuration)
    apart = abs(found.center - rival.center) if rival else 0.0
    if error <= SHOWN_SHARE * apart or error <= OWN_SHARE * visits.visit_error:
        return found
    # A confirming trial is measured to the end: stopping it early would favour one side.
    if purpose == "search" and rival is not None:
        worse = found.center - rival.center - CLEARLY_WORSE * scale
        return found if worse > SURELY * math.hypot(error, visits.error(rival)) else None
    return None


def settled(
    costs: Sequence[float],
    visits: Visits | None = None,
    configuration: Configuration | None = None,
) -> Estimate:
    """Estimate from the steps of a trial, without first ones in which it had not settled.

    Args:
        visits, configuration: see measured().
    """
    scale, spread = (visits.scale, visits.spread_like(configuration)) if visits else (1.0, 0.0)
    costs = _without_bad_moment(costs, max(BAD_MOMENT * scale, BAD_SPREADS * spread))
    return _of_mean_time(costs[_settled_from(costs, SETTLING * scale) :], scale)


def _of_mean_time(costs: Sequence[float], scale: float) -> Estimate:
    """The cost of the mean time: costs are its logarithm, and theirs would be that of a geometric
    mean, which takes settings that are fast and slow in turns for faster than they are."""
    found = estimate([math.exp((cost - costs[0]) / scale) for cost in costs])
    center = costs[0] + scale * math.log(found.center)
    return replace(found, center=center, standard_error=scale * found.standard_error / found.center)


def _without_bad_moment(costs: Sequence[float], margin: float) -> Sequence[float]:
    """The steps without those in which something else made all slow for a while: nothing makes
    several steps in succession fast by accident. What alternates between fast and slow counts.
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

"""Whether a gain is real, before what promises it is kept.

The winner of a search is partly the luckiest one, so it is measured again beside the default and
the trials of the search do not count here, unless the gain is far larger than luck; turns (winner,
baseline, winner, baseline, ...) keep both close together in time. What was best in an earlier run
of the same job was confirmed there: one trial says whether it still is.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from operator import attrgetter
from statistics import fmean

from bagua_autotune.measuring.rounds import Round
from bagua_autotune.measuring.trial_end import MOST_STEPS
from bagua_autotune.measuring.visits import Visits
from bagua_autotune.model.job import Trial
from bagua_autotune.model.statistics import MEDIAN_INEFFICIENCY, Estimate, Interval, difference
from bagua_wire.configuration import Configuration

FEWEST_PAIRS = 2
MOST_PAIRS = 6
# Where these promise much but visits differ by so much that nothing is certain, so many follow
# before one last look.
LAST_PAIRS = 4
# What is less is not worth another pair.
GAIN_THAT_MATTERS = 0.01
# Where so much lies between all blocks of the two sides, those of the search too, the gain is
# neither luck nor drift: one pair is enough.
CLEAR_GAIN, LUCK = 0.1, 2.0
# Where the search saw so much, so many pairs are measured before it is given up.
PROMISE, PROMISED_PAIRS = 0.04, 4
# By what the gain of one run differs from that of another, as a share of the gain, and at least.
GAIN_VARIES = 0.3
GAIN_VARIES_AT_LEAST = 0.01


# A gain of so many standard errors is shown in four of five confirmations: 1.96 for an interval
# without zero, 0.84 so that 80 % of them have none (Cohen, "Statistical power analysis", ch. 2).
SHOWN_ERRORS = 2.8


@dataclass(frozen=True)
class Confirmation:
    """Where a confirmation stands: what to measure next, or the gain it found.

    ``gain`` is the default's cost less the winner's.
    """

    next_configuration: Configuration | None
    gain: Interval | None = None


def confirm(round_: Round, winner: Configuration) -> Confirmation:
    """Decide from the confirming trials measured so far.

    Args:
        winner: what is to be confirmed, and must beat the default; other than that.
    """
    trials, baseline, scale = round_.trials, round_.job.baseline, round_.scale
    measured = confirming_trials(winner, trials)
    # The winner first: its trial says from then on who is being confirmed.
    upcoming = baseline if len(measured) % 2 else winner
    pairs, half_done = divmod(len(measured), 2)
    if round_.is_out_of_time and pairs < FEWEST_PAIRS:
        return Confirmation(None, _clear_gain(round_, winner) if pairs else None)
    if not round_.is_out_of_time and (half_done or not pairs):
        return Confirmation(upcoming)
    if pairs < FEWEST_PAIRS:
        clear = _clear_gain(round_, winner)
        return Confirmation(None, clear) if clear else Confirmation(upcoming)
    if not round_.is_out_of_time and MOST_PAIRS < pairs < MOST_PAIRS + LAST_PAIRS:
        return Confirmation(upcoming)
    # The winner's trials of the search were chosen for being low; the default's were not.
    gain = _gain(round_, _searched(trials, (baseline,)) + measured)
    if round_.is_out_of_time:
        return Confirmation(None, gain)
    if gain is None:  # most were in bad moments
        return Confirmation(upcoming if pairs < MOST_PAIRS else None)
    is_hopeful = gain.center > GAIN_THAT_MATTERS * scale
    # A lucky block of the default is not the end of what the search saw clearly.
    is_promised = pairs < PROMISED_PAIRS and _promise(trials, winner, baseline) > PROMISE * scale
    goes_on = is_hopeful or is_promised
    if pairs >= MOST_PAIRS:
        goes_on = pairs == MOST_PAIRS and gain.center > PROMISE * scale
    is_over = not (goes_on and is_undecided(gain, scale))
    return Confirmation(None, gain) if is_over else Confirmation(upcoming)


def is_undecided(gain: Interval, scale: float = 1.0) -> bool:
    """Whether a gain may be none, and may be one that matters.

    Args:
        scale: the difference of costs that is a gain of 100 %.
    """
    return gain.low <= 0 and gain.high > GAIN_THAT_MATTERS * scale


def _clear_gain(round_: Round, winner: Configuration) -> Interval | None:
    """The gain by all trials of both sides, those of the search too, if it is far above luck."""
    trials = round_.trials
    both = _searched(trials, (winner, round_.job.baseline)) + confirming_trials(winner, trials)
    gain = _gain(round_, both)
    return gain if gain and gain.low > 0 and _is_clear(round_, both) else None


def least_shown(visits: Visits) -> float:
    """The smallest gain that a confirmation of full length mostly shows, and that matters."""
    steps = MOST_STEPS["confirm"]
    inside = MEDIAN_INEFFICIENCY * visits.step_spread / math.sqrt(steps)
    error = visits.error(Estimate(0.0, inside, steps)) * math.sqrt(2 / MOST_PAIRS)
    return max(GAIN_THAT_MATTERS * visits.scale, SHOWN_ERRORS * error)


def most_trials(confirming: int) -> int:
    """How many confirming trials there are at most, after so many."""
    most = 2 * MOST_PAIRS
    return most if confirming <= most else most + 2 * LAST_PAIRS


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


def _gain(round_: Round, chosen: Sequence[Trial]) -> Interval | None:
    """Return the gain that the chosen trials of both sides show; None with less than two of one.

    All trials of the round count for one thing: what was repeated shows what blocks differ by.
    """
    bad = round_.visits.in_bad_moments
    chosen = [trial for trial in chosen if trial.index not in bad]
    sides = [trial.configuration == round_.job.baseline for trial in chosen]
    if min(sides.count(True), sides.count(False)) < 2:
        return None
    others: defaultdict[Configuration, list[Estimate]] = defaultdict(list)
    compared = {trial.configuration for trial in chosen}
    for trial in round_.visits.undisturbed:
        if trial.estimate and trial.configuration not in compared:
            others[trial.configuration].append(trial.estimate)
    return difference(
        [trial.estimate for trial in chosen if trial.estimate],
        sides,
        [trial.index for trial in chosen],
        [blocks for blocks in others.values() if len(blocks) > 1],
        round_.scale,
    )


def _promise(trials: Sequence[Trial], winner: Configuration, baseline: Configuration) -> float:
    """The gain by the trials of the search alone, partly luck."""
    centers = {
        side: [t.estimate.center for t in _searched(trials, (side,)) if t.estimate]
        for side in (winner, baseline)
    }
    if not all(centers.values()):
        return 0.0
    return fmean(centers[baseline]) - fmean(centers[winner])


def _is_clear(round_: Round, chosen: Sequence[Trial]) -> bool:
    """Whether even the winner's slowest visit and the default's fastest are apart by more than luck
    and drift explain."""
    visits, bad = round_.visits, round_.visits.in_bad_moments
    sides: dict[bool, list[Estimate]] = {True: [], False: []}
    for trial in chosen:
        if trial.estimate and trial.index not in bad:
            sides[trial.configuration == round_.job.baseline].append(trial.estimate)
    fastest = min(sides[True], key=attrgetter("center"), default=None)
    slowest = max(sides[False], key=attrgetter("center"), default=None)
    if fastest is None or slowest is None:
        return False
    luck = math.hypot(visits.error(fastest), visits.error(slowest))
    return fastest.center - slowest.center >= CLEAR_GAIN * round_.scale + LUCK * luck


def _searched(trials: Sequence[Trial], sides: Collection[Configuration]) -> list[Trial]:
    """The measured search trials of these configurations."""
    return [
        trial
        for trial in trials
        if trial.purpose == "search" and trial.estimate and trial.configuration in sides
    ]


def confirming_trials(candidate: Configuration, trials: Sequence[Trial]) -> list[Trial]:
    """The measured confirming trials from the candidate's first on: none of an earlier one's."""
    measured = [trial for trial in trials if trial.purpose == "confirm" and trial.estimate]
    return list(dropwhile(lambda trial: trial.configuration != candidate, measured))


def being_confirmed(round_: Round) -> Configuration | None:
    """Return what the latest confirmation of a round is, or was, about; None before there is one,
    or where the ranks failed in it.
    """
    failed = {trial.configuration for trial in round_.trials if trial.is_given_up}
    excluded = failed | {round_.job.baseline}
    confirming = (trial for trial in reversed(round_.trials) if trial.purpose == "confirm")
    return next((t.configuration for t in confirming if t.configuration not in excluded), None)

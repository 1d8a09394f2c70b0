"""Measuring the winner again beside the baseline, in turns, before it is kept.

The winner of a search is partly the luckiest one, so the trials of the search do not count
here; turns let a drift of the machine hit both sides alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bagua_autotune.model.job import Trial
from bagua_autotune.model.knobs import Configuration
from bagua_autotune.model.statistics import Interval, difference

FEWEST_PAIRS = 2
MOST_PAIRS = 4
GAIN_THAT_MATTERS = 0.01


@dataclass(frozen=True)
class Confirmation:
    """Where a confirmation stands: what to measure next, or the gain it found.

    ``gain`` is the baseline's cost less the winner's.
    """

    next_configuration: Configuration | None
    gain: Interval | None = None


def confirm(
    trials: Sequence[Trial], winner: Configuration, baseline: Configuration, scale: float
) -> Confirmation:
    """Decide from the confirming trials measured so far.

    Args:
        trials: all of the job's.
        winner: what is to be confirmed; other than the baseline.
        baseline: what it must beat.
        scale: the difference of costs that is a gain of 100 %.
    """
    measured = [trial for trial in trials if trial.purpose == "confirm" and trial.estimate]
    winners = [t.estimate for t in measured if t.configuration == winner and t.estimate]
    baselines = [t.estimate for t in measured if t.configuration == baseline and t.estimate]
    pairs = min(len(winners), len(baselines))
    if pairs >= FEWEST_PAIRS:
        gain = difference(baselines, winners)
        undecided = gain.low <= 0 < gain.center and gain.high > GAIN_THAT_MATTERS * scale
        if pairs >= MOST_PAIRS or not undecided:
            return Confirmation(None, gain)
    # The winner first: its trial says from then on who is being confirmed.
    return Confirmation(winner if len(winners) <= len(baselines) else baseline)

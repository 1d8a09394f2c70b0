"""Measuring the winner again beside the baseline, in turns, before it is kept.

The winner of a search is partly the luckiest one, so the trials of the search do not count
here; turns (winner, baseline, baseline, winner, ...) let a drift of the machine cancel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile

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
    measured = _since_first(winner, trials)
    # The winner first: its trial says from then on who is being confirmed.
    upcoming = winner if len(measured) % 4 in (0, 3) else baseline
    pairs, half_done = divmod(len(measured), 2)
    if half_done or pairs < FEWEST_PAIRS:
        return Confirmation(upcoming)
    blocks = [trial.estimate for trial in measured if trial.estimate]
    gain = difference(blocks, [trial.configuration == baseline for trial in measured])
    is_undecided = gain.low <= 0 < gain.center and gain.high > GAIN_THAT_MATTERS * scale
    if is_undecided and pairs < MOST_PAIRS:
        return Confirmation(upcoming)
    return Confirmation(None, gain)


def _since_first(winner: Configuration, trials: Sequence[Trial]) -> list[Trial]:
    """The measured confirming trials from the winner's first on: none of an earlier winner's."""
    measured = [trial for trial in trials if trial.purpose == "confirm" and trial.estimate]
    return list(dropwhile(lambda trial: trial.configuration != winner, measured))

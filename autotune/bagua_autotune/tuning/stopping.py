"""When the search ends: when what is still to be gained is less than what finding it costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bagua_autotune.model.job import Trial
from bagua_autotune.model.knobs import Configuration
from bagua_autotune.search import Searcher

SMALLEST_GAIN = 0.005
TRIALS_BEYOND_DESIGN = 2
# So many trials that find nothing better end the search, whatever the searcher still expects:
# on a machine that gets steadily slower it mistakes the drift for noise and hopes for ever.
PATIENCE_TRIALS = 6


def search_has_ended(
    trials: Sequence[Trial],
    candidates: Sequence[Configuration],
    searcher: Searcher,
    max_samples: int,
    scale: float,
) -> bool:
    """Whether the search trials so far are enough.

    Args:
        trials: the search trials, failed ones too: they cost time as well.
        candidates: what may still be proposed.
        searcher: told of all measured ones.
        max_samples: the most search trials.
        scale: the difference of costs that is a gain of 100 %.
    """
    measured = [trial for trial in trials if trial.state == "measured"]
    if len(trials) >= max_samples:
        return True
    if set(candidates) <= {trial.configuration for trial in measured}:
        return True
    if len(measured) < searcher.initial_trials + TRIALS_BEYOND_DESIGN:
        return False
    if searcher.expected_gain() < SMALLEST_GAIN * scale:
        return True
    if len(measured) < searcher.initial_trials + PATIENCE_TRIALS:
        return False
    allowed = set(candidates)
    tried = [trial.configuration for trial in measured if trial.configuration in allowed]
    return _gain_of_last(PATIENCE_TRIALS, tried, searcher) < SMALLEST_GAIN * scale


def _gain_of_last(count: int, tried: Sequence[Configuration], searcher: Searcher) -> float:
    """By how much the last trials lowered the best expected cost, as all trials tell it now."""
    before = [searcher.expected_cost(configuration) for configuration in set(tried[:-count])]
    since = [searcher.expected_cost(configuration) for configuration in set(tried)]
    return min(before) - min(since) if before else math.inf

"""When the search ends: when what is still to be gained is less than what finding it costs."""

from __future__ import annotations

from collections.abc import Sequence

from bagua_autotune.model.job import Trial
from bagua_autotune.model.knobs import Configuration
from bagua_autotune.search import Searcher

SMALLEST_GAIN = 0.005
TRIALS_BEYOND_DESIGN = 2


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
    return searcher.expected_gain() < SMALLEST_GAIN * scale

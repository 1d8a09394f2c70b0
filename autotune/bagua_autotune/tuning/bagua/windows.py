"""Windows (one report of each rank) that lack some ranks' reports, made comparable.

The first rank's ask decides, and at that time the others' reports of the last window are often
still under way.  Ranks differ in speed, so the mean of those present would be off by more than
configurations differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from bagua_autotune.model.job import Observation
from bagua_autotune.tuning.objective import bounded

# A trial's first two windows agree if they differ by less than this, else it goes on: a pause
# now and then must not decide which configuration wins.
AGREEMENT_RATIO = 0.05
MOST_WINDOWS = 4


def are_enough(windows: Sequence[Observation], is_long: bool) -> bool:
    """Whether a trial is measured: two windows that agree, or three if it took long, or four."""
    if len(windows) != 2:
        return len(windows) >= (MOST_WINDOWS - 1 if is_long else MOST_WINDOWS)
    first, second = (_mean(window, _present(window)) for window in windows)
    return abs(first - second) <= AGREEMENT_RATIO * (abs(first) + abs(second)) / 2


def comparable(
    windows: Sequence[Observation], references: Sequence[Observation], rank_count: int
) -> list[Observation]:
    """The windows as if all ranks had reported; those of which that cannot be said are left out.

    Args:
        windows: of one trial.
        references: of all of the job's trials; the complete ones tell how ranks differ.
        rank_count: how many reports make a window complete.
    """
    complete = [window for window in references if _count(window) >= rank_count]
    found = []
    for window in windows:
        if _count(window) >= rank_count:
            found.append(window)
        elif alike := [other for other in complete if _present(window) <= _present(other)]:
            found.append(Observation(window.step, (_mean_of_all(window, alike),)))
    return found


def _mean_of_all(window: Observation, complete: Sequence[Observation]) -> float:
    """What the mean over all ranks would be, from the ranks that are present.

    In proportion, as speeds are; by the difference if the means are not all of one sign.
    """
    present = _present(window)
    mean = _mean(window, present)
    parts = [_mean(other, present) for other in complete]
    wholes = [_mean(other, _present(other)) for other in complete]
    means = (mean, *parts, *wholes)
    if min(means) > 0 or max(means) < 0:
        return bounded(mean * median(w / p for w, p in zip(wholes, parts, strict=True)))
    return bounded(mean + median(w - p for w, p in zip(wholes, parts, strict=True)))


def _present(window: Observation) -> set[int]:
    return {rank for rank, value in enumerate(window.values) if value is not None}


def _count(window: Observation) -> int:
    return len(_present(window))


def _mean(window: Observation, ranks: set[int]) -> float:
    return fmean(window.values[rank] or 0.0 for rank in ranks)

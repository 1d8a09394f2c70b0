"""Windows (one report of each rank) that lack some ranks' reports, made comparable.

The first rank's ask decides, and at that time the others' reports of the last window are often
still under way.  Ranks differ in speed, so the mean of those present would be off by more than
configurations differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from bagua_autotune.model.job import Observation

# Beyond this the differences and squares of speeds would leave the range of floats.
LARGEST_SPEED = 1e100


def bounded(speed: float) -> float:
    """The speed within ±LARGEST_SPEED."""
    return max(-LARGEST_SPEED, min(LARGEST_SPEED, speed))


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

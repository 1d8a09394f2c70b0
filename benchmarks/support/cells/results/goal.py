"""A goal, and how it is checked on many cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.support.harness import Comparison

from .figures import Figures, SpeedUp

FEWEST_FOR_INTERVAL = 6
"""With fewer rounds the bootstrap of a median ends at the least and at the largest of them."""


@dataclass(frozen=True)
class Goal:
    """``is_met``: None where nothing was measured that could tell."""

    number: int
    what: str
    found: str
    is_met: bool | None

    @property
    def verdict(self) -> str:
        return {True: "met", False: "MISSED", None: "not measured"}[self.is_met]


Check = tuple[float, str, bool]
"""How bad a cell is, its figure in words, and whether it meets the goal."""


def every(
    number: int, what: str, cells: Sequence[Figures], check: Callable[[Figures], Check]
) -> Goal:
    """A goal of each cell: how many meet it, the worst, and all that miss."""
    if not cells:
        return Goal(number, what, "no cell", None)
    checks: list[tuple[Check, Figures]] = [(check(cell), cell) for cell in cells]
    missed = [(found, cell) for found, cell in checks if not found[2]]
    worst, where = max(checks, key=lambda pair: pair[0][0])
    words = (
        f"{len(checks) - len(missed)} of {len(checks)} cells; worst {where.cell.name}: {worst[1]}"
    )
    others = [f"{cell.cell.name}: {found[1]}" for found, cell in missed if cell is not where]
    if others:
        words += "; missed too by " + ", ".join(others)
    return Goal(number, what, words, not missed)


def geometric_mean(values: Iterable[float]) -> float:
    return math.exp(fmean(math.log(value) for value in values))


def with_interval(ratio: Comparison) -> str:
    """``1.013 (1.008 to 1.017)``: the median of the pairs' ratios with its 95 % interval; of few
    rounds it is their range, and how many they are is said."""
    few = "" if ratio.pairs >= FEWEST_FOR_INTERVAL else f", range of {ratio.pairs}"
    return f"{ratio.paired_ratio:.3f} ({ratio.low:.3f} to {ratio.high:.3f}{few})"


def mean_speedup(found: Iterable[SpeedUp]) -> float:
    """Geometric."""
    return geometric_mean(each.found.paired_ratio for each in found)

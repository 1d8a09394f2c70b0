"""What the bench must show, each checked on its figures and said as met or missed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean
from typing import Any

from harness import Comparison

from .figures import EXPOSED, Figures

OVER_BEST = 1.02
OVER_STOCK = 1.01
SPEEDUP_OVER_STOCK = 1.15
SPEEDUP_OVER_BAGUA_DEFAULT = 1.0826
"""What Bagua published for its tuner, over its default."""
TUNING_STEPS = 200
CELL_SECONDS = 900.0
SMOKE_SECONDS = 90.0
CELL_TIME = (
    f"a cell without Bagua's tuning under {CELL_SECONDS:.0f} s, "
    f"a smoke cell under {SMOKE_SECONDS:.0f} s"
)
MEDIAN_ERROR = 0.10
BEST_SIZE_EXCESS = 0.03


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


def goals(cells: Sequence[Figures], calibration: Mapping[str, Any] | None = None) -> list[Goal]:
    """All goals on all cells; ``calibration`` is the document of calibration.py."""
    return [
        _every(1, f"tuned over the sweep's best at most {OVER_BEST}", cells, _over_best),
        _every(1, f"tuned over stock DDP's default at most {OVER_STOCK}", cells, _over_stock),
        *_speedups(cells),
        _tuning_steps(cells),
        _choices(cells),
        _agreement(cells),
        _every(5, CELL_TIME, cells, _seconds),
        *_calibration(calibration),
    ]


def geometric_mean(values: Iterable[float]) -> float:
    return math.exp(fmean(math.log(value) for value in values))


def with_interval(ratio: Comparison) -> str:
    """``1.013 (1.008 to 1.017)``: the median of the pairs' ratios with its 95 % interval."""
    return f"{ratio.paired_ratio:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


Check = tuple[float, str, bool]
"""How bad a cell is, its figure in words, and whether it meets the goal."""


def _over_best(cell: Figures) -> Check:
    found = cell.tuned_over_best
    return found.paired_ratio, with_interval(found), found.paired_ratio <= OVER_BEST


def _over_stock(cell: Figures) -> Check:
    found = cell.tuned_over_stock
    return found.paired_ratio, with_interval(found), found.paired_ratio <= OVER_STOCK


def _steps(cell: Figures) -> Check:
    steps, ended = cell.tuning_steps, bool(cell.tuning["ended"])
    words = f"{steps} steps" if ended else f"not ended after {steps} steps"
    return steps, words, ended and steps <= TUNING_STEPS


def _seconds(cell: Figures) -> Check:
    found, most = cell.seconds_without_bagua, SMOKE_SECONDS if cell.cell.smoke else CELL_SECONDS
    return found / most, f"{found:.0f} s", found < most


def _tuning_steps(cells: Sequence[Figures]) -> Goal:
    goal = _every(3, f"tuning takes at most {TUNING_STEPS} steps", cells, _steps)
    beside = [
        f"{cell.cell.name}: {cell.tuning_steps} and {'' if bagua['ended'] else 'over '}"
        f"{bagua['tuning_steps']}"
        for cell in cells
        if (bagua := cell.bagua)
    ]
    words = f"; ours and Bagua's own: {', '.join(beside)}" if beside else ""
    return replace(goal, found=goal.found + words)


def _every(
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


def _speedups(cells: Sequence[Figures]) -> list[Goal]:
    """Geometric means over the cells where communication is exposed."""
    exposed = [cell for cell in cells if cell.is_exposed]
    found = []
    for what, least, ratios in (
        ("stock DDP's default", SPEEDUP_OVER_STOCK, [c.speedup_over_stock for c in exposed]),
        (
            "Bagua's default",
            SPEEDUP_OVER_BAGUA_DEFAULT,
            [c.speedup_over_bagua_default for c in exposed],
        ),
    ):
        is_first = least == SPEEDUP_OVER_STOCK
        name = f"speed-up over {what} {'at least' if is_first else 'more than'} {least}"
        if not exposed:
            words = f"no cell of {len(cells)} is exposed (step over computing {EXPOSED} and more)"
            found.append(Goal(2, name, words, None))
            continue
        mean = geometric_mean(ratio.paired_ratio for ratio in ratios)
        words = f"{mean:.3f}, geometric mean of {len(exposed)} exposed cells of {len(cells)}"
        found.append(Goal(2, name, words, mean >= least if is_first else mean > least))
    return found


def _choices(cells: Sequence[Figures]) -> Goal:
    what = "hierarchical where it wins in the sweep, flat where it loses"
    choices = [(cell, cell.choice) for cell in cells if cell.choice]
    clear = [(cell, choice) for cell, choice in choices if choice.winner]
    if not clear:
        return Goal(4, what, f"no clear winner in {len(choices)} cells", None)
    wrong = [
        f"{cell.cell.name}: {choice.tuned}, sweep says {choice.winner} "
        f"({with_interval(choice.hierarchical_over_flat)} of flat)"
        for cell, choice in clear
        if choice.tuned != choice.winner
    ]
    alike = len(choices) - len(clear)
    words = f"{len(clear) - len(wrong)} of {len(clear)} cells with a clear winner, {alike} without"
    return Goal(4, what, "; ".join([words, *wrong]), not wrong)


def _agreement(cells: Sequence[Figures]) -> Goal:
    """Runs of the same cell: intervals of the tuned step time must overlap."""
    what = "two runs of a cell agree on the tuned step time within the spread"
    pairs = [
        (first, second)
        for first, second in combinations(cells, 2)
        if first.cell.place == second.cell.place
    ]
    if not pairs:
        return Goal(5, what, "no cell ran twice (--repeat 2)", None)
    words, are_met = [], []
    for first, second in pairs:
        one, other = first.run_off["tuned"], second.run_off["tuned"]
        agrees = one.low <= other.high and other.low <= one.high
        are_met.append(agrees)
        words.append(
            f"{first.cell.place}: {1e3 * one.seconds:.1f} ({1e3 * one.low:.1f} to "
            f"{1e3 * one.high:.1f}) and {1e3 * other.seconds:.1f} ({1e3 * other.low:.1f} to "
            f"{1e3 * other.high:.1f}) ms{'' if agrees else ' do not'}"
        )
    return Goal(5, what, "; ".join(words), all(are_met))


def _calibration(calibration: Mapping[str, Any] | None) -> list[Goal]:
    error = f"simulator's median error at most {MEDIAN_ERROR:.0%}"
    size = f"simulator's best size within {BEST_SIZE_EXCESS:.0%} of the true best"
    if calibration is None:
        nothing = "no cell has a profile"
        return [Goal(6, error, nothing, None), Goal(6, size, nothing, None)]
    median_error = float(calibration["median_error"])
    worst = max(calibration["cells"], key=lambda cell: cell["excess"])
    return [
        Goal(6, error, f"{median_error:.1%}", median_error <= MEDIAN_ERROR),
        Goal(
            6,
            size,
            f"worst {worst['cell']}: {worst['excess']:.1%}",
            worst["excess"] <= BEST_SIZE_EXCESS,
        ),
    ]

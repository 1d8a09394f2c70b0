"""What the bench must show, each checked on its figures and said as met or missed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

from benchmarks.support.cells.figures import EXPOSED, Figures, SpeedUp
from benchmarks.support.harness import Comparison, Spread

FEWEST_FOR_INTERVAL = 6
"""With fewer rounds the bootstrap of a median ends at the least and at the largest of them."""
Check = tuple[float, str, bool]
"""How bad a cell is, its figure in words, and whether it meets the goal."""
OVER_BEST = 1.02
OVER_STOCK = 1.01
SPEEDUP_OVER_STOCK = 1.15
SPEEDUP_OVER_BAGUA_DEFAULT = 1.0826
"""What Bagua published for its tuner, over its default."""
TUNING_STEPS = 200
CELL_SECONDS = 900.0
SMOKE_SECONDS = 90.0
CELL_TIME = f"a cell under {CELL_SECONDS:.0f} s, a smoke cell under {SMOKE_SECONDS:.0f} s"


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


def judged(cells: Sequence[Figures]) -> tuple[list[Figures], list[str]]:
    """The cells that goals are for, and the names of the others with the reason: what ran over
    loopback, and smoke cells unless there is nothing else."""
    only_smoke = all(cell.cell.smoke for cell in cells)
    kept, left_out = [], []
    for cell in cells:
        if cell.fallback:
            left_out.append(f"{cell.cell.name} (loopback)")
        elif cell.cell.smoke and not only_smoke:
            left_out.append(f"{cell.cell.name} (smoke)")
        else:
            kept.append(cell)
    return kept, left_out


def goals(cells: Sequence[Figures]) -> list[Goal]:
    """All goals on these cells; none is for cells on GPUs."""
    cells = [cell for cell in cells if cell.cell.device != "cuda"]
    return [
        every(1, f"tuned over the sweep's best at most {OVER_BEST}", cells, _over_best),
        every(1, f"tuned over stock DDP's default at most {OVER_STOCK}", cells, _over_stock),
        *_speedups(cells),
        every(3, f"tuning takes at most {TUNING_STEPS} steps", cells, _steps),
        _choices(cells),
        _agreement(cells),
        every(5, CELL_TIME, cells, _seconds),
    ]


def _over_best(cell: Figures) -> Check:
    found = cell.tuned_over_best
    return found.paired_ratio, with_interval(found), found.paired_ratio <= OVER_BEST


def _over_stock(cell: Figures) -> Check:
    found = cell.tuned_over_stock
    return found.paired_ratio, with_interval(found), found.paired_ratio <= OVER_STOCK


def _steps(cell: Figures) -> Check:
    steps, ended = cell.tuning_steps, bool(cell.tuning["ended"])
    stored = cell.tuning["stored"]
    if not ended:
        words = f"not ended after {steps} steps"
    elif stored["state"] != "finished" or not stored["result"]:
        words = f"after {steps} steps no result: {stored['state']}"
    else:
        return steps, f"{steps} steps", steps <= TUNING_STEPS
    return math.inf, words, False


def _seconds(cell: Figures) -> Check:
    found, most = cell.seconds["total"], SMOKE_SECONDS if cell.cell.smoke else CELL_SECONDS
    return found / most, f"{found:.0f} s", found < most


def _speedups(cells: Sequence[Figures]) -> list[Goal]:
    """Geometric means over the cells where communication is exposed, each counted once."""
    first = [cell for cell in cells if cell.cell.run == 1]
    exposed = [cell for cell in first if cell.is_exposed]
    stock = f"speed-up over stock DDP's default at least {SPEEDUP_OVER_STOCK}"
    bagua = f"speed-up over Bagua's default more than {SPEEDUP_OVER_BAGUA_DEFAULT}"
    if not exposed:
        words = f"no cell of {len(first)} is exposed (step over computing {EXPOSED} and more)"
        return [Goal(2, stock, words, None), Goal(2, bagua, words, None)]
    where = f"geometric mean of {len(exposed)} exposed cells of {len(first)}"
    over_stock = mean_speedup(cell.over_stock for cell in exposed)
    over_bagua = mean_speedup(cell.over_bagua_default for cell in exposed)
    scaled = mean_speedup(cell.over_scaled_stock for cell in exposed)
    best = mean_speedup(cell.over_best_stock for cell in exposed)
    beside = f"{scaled:.3f} over the scaled default, {best:.3f} over stock DDP at its best size"
    scaled_bagua = mean_speedup(cell.over_scaled_bagua_default for cell in exposed)
    return [
        Goal(2, stock, f"{over_stock:.3f}, {where}; {beside}", over_stock >= SPEEDUP_OVER_STOCK),
        Goal(
            2,
            bagua,
            f"{over_bagua:.3f}, {where}; {scaled_bagua:.3f} over the scaled default",
            over_bagua > SPEEDUP_OVER_BAGUA_DEFAULT,
        ),
    ]


def _choices(cells: Sequence[Figures]) -> Goal:
    what = "hierarchical where it wins, flat where it loses, each at the best size of the sweep"
    choices = [(cell, cell.choice) for cell in cells if cell.choice]
    clear = [(cell, choice) for cell, choice in choices if choice.winner]
    if not clear:
        return Goal(4, what, f"no clear winner in {len(choices)} cells", None)
    wrong = [
        f"{cell.cell.name}: {choice.tuned}, the {choice.stage} says {choice.winner} "
        f"({with_interval(choice.hierarchical_over_flat)} of flat)"
        for cell, choice in clear
        if choice.tuned != choice.winner
    ]
    alike = len(choices) - len(clear)
    words = f"{len(clear) - len(wrong)} of {len(clear)} cells with a clear winner, {alike} without"
    return Goal(4, what, "; ".join([words, *wrong]), not wrong)


def _agreement(cells: Sequence[Figures]) -> Goal:
    """Runs of the same cell: 95 % intervals of the tuned step time must overlap."""
    what = "two runs of a cell agree on the tuned step time (95 % intervals overlap)"
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
        verb = "agree" if agrees else "do not agree"
        words.append(f"{first.cell.place}: {_in_ms(one)} and {_in_ms(other)} {verb}")
    return Goal(5, what, "; ".join(words), all(are_met))


def _in_ms(found: Spread) -> str:
    low, middle, high = (f"{1e3 * each:.1f}" for each in (found.low, found.seconds, found.high))
    width = (found.high - found.low) / found.seconds
    return f"{middle} ms ({low} to {high}, {width:.1%} wide)"

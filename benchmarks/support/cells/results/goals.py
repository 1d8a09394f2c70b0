"""What the bench must show, each checked on its figures and said as met or missed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

from .figures import EXPOSED, Figures
from .goal import Check, Goal, every, mean_speedup, with_interval
from .spread import Spread

OVER_BEST = 1.02
OVER_STOCK = 1.01
SPEEDUP_OVER_STOCK = 1.15
SPEEDUP_OVER_BAGUA_DEFAULT = 1.0826
"""What Bagua published for its tuner, over its default."""
TUNING_STEPS = 200
CELL_SECONDS = 900.0
SMOKE_SECONDS = 90.0
CELL_TIME = f"a cell under {CELL_SECONDS:.0f} s, a smoke cell under {SMOKE_SECONDS:.0f} s"


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

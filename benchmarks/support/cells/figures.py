"""What a cell showed: medians with spread, ratios in pairs, and what the tunings took; and whether
that is what the bench must show, each goal said as met or missed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import geometric_mean, median
from typing import Any

from benchmarks.support.cells.cell import (
    BAGUA_DEFAULT,
    COMPRESSED,
    COMPUTE,
    STOCK_DEFAULT,
    TUNED,
    TUNED_ALLOWED,
    Cell,
    best_flat,
    best_hierarchical,
    best_stock,
    is_hierarchical,
    is_swept,
    scaled_bagua_default,
    scaled_stock_default,
)
from benchmarks.support.harness import Comparison, Spread, ratio, spread

EXPOSED = 1.10
"""Communication is exposed where stock DDP's default step takes so many times the computing."""
UNSETTLED_STEPS = 3
"""After the end of a tuning: what is kept comes into force in the next step, maybe with a re-cut
that takes two."""
WORTH_CHOOSING = 0.01
"""Ways of reducing that differ by less are alike."""


@dataclass(frozen=True)
class Allowed:
    """The job that was tuned with 16 bits allowed.

    Attributes:
        over_stock, over_compressed: how many times as fast as stock DDP's default, and as that with
            torch's own hook for 16 bits (None: not measured).
    """

    step: Spread
    over_stock: Comparison
    over_compressed: Comparison | None
    configuration: dict[str, Any]
    tuning: dict[str, Any]


def _allowed(result: Mapping[str, Any]) -> Allowed:
    run_off, compressed = result["run_off"]["arms"], result["run_off"]["arms"].get(COMPRESSED)
    tuned = run_off[TUNED_ALLOWED]
    return Allowed(
        step=spread(tuned),
        over_stock=ratio(tuned, run_off[STOCK_DEFAULT]),
        over_compressed=ratio(tuned, compressed) if compressed else None,
        configuration=result["arms"][TUNED_ALLOWED]["configuration"],
        tuning=result["allowed"],
    )


@dataclass(frozen=True)
class SpeedUp:
    """The step time of another arm over that of the tuned job.

    Attributes:
        over: the other arm.
        stage: "run-off", or "sweep" where only that measured it.
        found: in pairs of rounds of that stage.
    """

    over: str
    stage: str
    found: Comparison


@dataclass(frozen=True)
class Choice:
    """The two ways of reducing, each at its best size of the sweep.

    Attributes:
        flat, hierarchical: the arms' names.
        stage: as in ``SpeedUp``.
        hierarchical_over_flat: in pairs of rounds of that stage.
        winner: "flat", "hierarchical", or None where they are alike: within 1 % of each other, or
            with an interval that holds 1.
        tuned: what the tuned job does.
    """

    flat: str
    hierarchical: str
    stage: str
    hierarchical_over_flat: Comparison
    winner: str | None
    tuned: str


@dataclass(frozen=True)
class Figures:
    """Of one cell.

    Attributes:
        sweep, run_off: the arms of stage 1 and 2.
        best: the arm of the sweep with the lowest median in stage 2.
        tuned_over_best, tuned_over_stock, stock_over_compute: of stage 2, in pairs of rounds.
        over_stock, over_bagua_default: speed-up over the defaults, whatever the model's size.
        over_scaled_stock, over_scaled_bagua_default: over the defaults as small as the model was
            made.
        over_best_stock: over stock DDP at its best size.
        choice: None where there is nothing to choose.
        compressed: stock DDP with torch's own hook for 16 bits; None: not measured.
        allowed: None: nothing was tuned with 16 bits allowed.
        machine: on what it was measured, as far as it is known.
    """

    cell: Cell
    fallback: str | None
    sweep: dict[str, Spread]
    run_off: dict[str, Spread]
    best: str
    tuned_over_best: Comparison
    tuned_over_stock: Comparison
    over_stock: SpeedUp
    over_scaled_stock: SpeedUp
    over_best_stock: SpeedUp
    over_bagua_default: SpeedUp
    over_scaled_bagua_default: SpeedUp
    stock_over_compute: Comparison
    choice: Choice | None
    configuration: dict[str, Any]
    tuning: dict[str, Any]
    seconds: dict[str, float]
    compressed: Spread | None
    allowed: Allowed | None
    machine: dict[str, Any]

    @property
    def is_exposed(self) -> bool:
        return self.stock_over_compute.paired_ratio >= EXPOSED

    @property
    def tuning_steps(self) -> int:
        """All steps until the tuning had ended, those before its first switch too."""
        return int(self.tuning["tuning_steps"])

    @property
    def own_after(self) -> float | None:
        """A step of the tuned job itself, after its tuning, over one of the run-off's arm with what
        it was left at, in medians; None: it was cut off too early. Far from 1, one of the two does
        not show what users get.
        """
        after = self.tuning["step_seconds"][self.tuning_steps + UNSETTLED_STEPS :]
        return median(after) / self.run_off[TUNED].seconds if after else None

    @property
    def switch_steps(self) -> int:
        """Steps from the first switch to the last."""
        switches = [step for step, _ in self.tuning["configurations"][1:]]
        return switches[-1] - switches[0] if switches else 0


def figures_of(result: Mapping[str, Any]) -> Figures:
    """From the JSON of a cell.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    arms, run_off, cell = result["arms"], result["run_off"]["arms"], Cell.from_json(result["cell"])
    medians = _spreads(result, "run_off")
    sweep = _spreads(result, "sweep")
    every = list(arms.values())
    swept = [name for name in run_off if is_swept(arms[name])]
    best = min(swept, key=lambda name: medians[name].seconds)
    stock, tuned = run_off[STOCK_DEFAULT], run_off[TUNED]
    return Figures(
        cell=cell,
        fallback=result["fallback"],
        sweep=sweep,
        run_off=medians,
        best=best,
        tuned_over_best=ratio(run_off[best], tuned),
        tuned_over_stock=ratio(stock, tuned),
        over_stock=_speed_up(result, STOCK_DEFAULT),
        over_scaled_stock=_speed_up(result, scaled_stock_default(every, cell)),
        over_best_stock=_speed_up(result, best_stock(every, sweep)),
        over_bagua_default=_speed_up(result, BAGUA_DEFAULT),
        over_scaled_bagua_default=_speed_up(result, scaled_bagua_default(every, cell)),
        stock_over_compute=ratio(run_off[COMPUTE], stock),
        choice=_choice(result, sweep),
        configuration=arms[TUNED]["configuration"],
        tuning=result["tuning"],
        seconds=result["seconds"],
        compressed=medians.get(COMPRESSED),
        allowed=_allowed(result) if result.get("allowed") else None,
        machine={**result.get("machine", {}), **result.get("conditions", {})},
    )


def _spreads(result: Mapping[str, Any], stage: str) -> dict[str, Spread]:
    return {name: spread(blocks) for name, blocks in result[stage]["arms"].items()}


def _compared(result: Mapping[str, Any], reference: str, other: str) -> tuple[str, Comparison]:
    """In the run-off if both took part, else in the sweep; and where."""
    stage = "run_off" if {reference, other} <= set(result["run_off"]["arms"]) else "sweep"
    blocks = result[stage]["arms"]
    return stage.replace("_", "-"), ratio(blocks[reference], blocks[other])


def _speed_up(result: Mapping[str, Any], over: str) -> SpeedUp:
    return SpeedUp(over, *_compared(result, TUNED, over))


def _choice(result: Mapping[str, Any], sweep: Mapping[str, Spread]) -> Choice | None:
    arms = list(result["arms"].values())
    flat, hierarchical = best_flat(arms, sweep), best_hierarchical(arms, sweep)
    if hierarchical is None:
        return None
    stage, compared = _compared(result, flat, hierarchical)
    return Choice(
        flat=flat,
        hierarchical=hierarchical,
        stage=stage,
        hierarchical_over_flat=compared,
        winner=_winner(compared),
        tuned="hierarchical" if is_hierarchical(result["arms"][TUNED]) else "flat",
    )


def _winner(compared: Comparison) -> str | None:
    if compared.high < 1 and compared.paired_ratio < 1 - WORTH_CHOOSING:
        return "hierarchical"
    if compared.low > 1 and compared.paired_ratio > 1 + WORTH_CHOOSING:
        return "flat"
    return None


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

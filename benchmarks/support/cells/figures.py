"""What a cell showed: medians with spread, ratios in pairs, and what the tunings took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.support.cells.cell import (
    BAGUA_DEFAULT,
    COMPRESSED,
    COMPUTE,
    STOCK_DEFAULT,
    TUNED,
    TUNED_ALLOWED,
    Cell,
    is_swept,
)
from benchmarks.support.cells.selection import (
    best_flat,
    best_hierarchical,
    best_stock,
    is_hierarchical,
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


@dataclass(frozen=True)
class Beside:
    compressed: Spread | None = None
    allowed: Allowed | None = None


def beside_of(result: Mapping[str, Any]) -> Beside:
    """From the JSON of a cell."""
    run_off = result["run_off"]["arms"]
    compressed = run_off.get(COMPRESSED)
    return Beside(
        compressed=spread(compressed) if compressed else None,
        allowed=_allowed(result) if result.get("allowed") else None,
    )


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
        beside: what only some cells have.
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
    beside: Beside
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
        beside=beside_of(result),
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

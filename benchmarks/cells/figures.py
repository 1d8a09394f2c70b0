"""What a cell showed: medians with spread, ratios in pairs, and what the tunings took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness import Comparison

from .arms import BAGUA_DEFAULT, BAGUA_TUNED, COMPUTE, STOCK_DEFAULT, TUNED, is_swept
from .cell import Cell
from .spread import Spread, ratio, spread

EXPOSED = 1.10
"""Communication is exposed where stock DDP's default step takes so many times the computing."""
WORTH_CHOOSING = 0.01
"""Ways of reducing that differ by less are alike."""


@dataclass(frozen=True)
class Choice:
    """The two ways of reducing, each at its best size of the sweep.

    Attributes:
        flat, hierarchical: the arms' names.
        hierarchical_over_flat: in pairs of rounds of the sweep.
        winner: "flat", "hierarchical", or None where they are alike: within 1 % of each other, or
            with an interval that holds 1.
        tuned: what the tuned job does.
    """

    flat: str
    hierarchical: str
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
        speedup_over_stock, speedup_over_bagua_default: the other way round.
        bagua_over_tuned: where Bagua's own tuned the job too.
        choice: None where there is nothing to choose.
    """

    cell: Cell
    fallback: str | None
    sweep: dict[str, Spread]
    run_off: dict[str, Spread]
    best: str
    tuned_over_best: Comparison
    tuned_over_stock: Comparison
    speedup_over_stock: Comparison
    speedup_over_bagua_default: Comparison
    bagua_over_tuned: Comparison | None
    stock_over_compute: Comparison
    choice: Choice | None
    configuration: dict[str, Any]
    tuning: dict[str, Any]
    bagua: dict[str, Any] | None
    seconds: dict[str, float]

    @property
    def is_exposed(self) -> bool:
        return self.stock_over_compute.paired_ratio >= EXPOSED

    @property
    def tuning_steps(self) -> int:
        """All steps until the tuning had ended, those before its first switch too."""
        return int(self.tuning["tuning_steps"])

    @property
    def switch_steps(self) -> int:
        """Steps from the first switch to the last."""
        switches = [step for step, _ in self.tuning["configurations"][1:]]
        return switches[-1] - switches[0] if switches else 0

    @property
    def seconds_without_bagua(self) -> float:
        return self.seconds["total"] - self.seconds.get("bagua", 0.0)


def figures_of(result: Mapping[str, Any]) -> Figures:
    """From the JSON of a cell."""
    arms, run_off = result["arms"], result["run_off"]["arms"]
    medians = {name: spread(blocks) for name, blocks in run_off.items()}
    swept = [name for name in run_off if is_swept(arms[name])]
    best = min(swept, key=lambda name: medians[name].seconds)
    stock, tuned, bagua = run_off[STOCK_DEFAULT], run_off[TUNED], run_off.get(BAGUA_TUNED)
    return Figures(
        cell=Cell.from_json(result["cell"]),
        fallback=result["fallback"],
        sweep={name: spread(blocks) for name, blocks in result["sweep"]["arms"].items()},
        run_off=medians,
        best=best,
        tuned_over_best=ratio(run_off[best], tuned),
        tuned_over_stock=ratio(stock, tuned),
        speedup_over_stock=ratio(tuned, stock),
        speedup_over_bagua_default=ratio(tuned, run_off[BAGUA_DEFAULT]),
        bagua_over_tuned=ratio(tuned, bagua) if bagua else None,
        stock_over_compute=ratio(run_off[COMPUTE], stock),
        choice=_choice(result),
        configuration=arms[TUNED]["configuration"],
        tuning=result["tuning"],
        bagua=result["bagua"],
        seconds=result["seconds"],
    )


def _choice(result: Mapping[str, Any]) -> Choice | None:
    arms, blocks = result["arms"], result["sweep"]["arms"]
    swept = [arm for arm in arms.values() if is_swept(arm)]
    flat = [arm["name"] for arm in swept if arm["configuration"]["hierarchical"] == "off"]
    others = [arm["name"] for arm in swept if arm["name"] not in flat]
    if not others:
        return None
    fastest = {name: spread(blocks[name]).seconds for name in [*flat, *others]}
    best_flat, best_other = (min(names, key=fastest.__getitem__) for names in (flat, others))
    compared = ratio(blocks[best_flat], blocks[best_other])
    tuned = arms[TUNED]["configuration"]["hierarchical"]
    return Choice(
        flat=best_flat,
        hierarchical=best_other,
        hierarchical_over_flat=compared,
        winner=_winner(compared),
        tuned="flat" if tuned == "off" else "hierarchical",
    )


def _winner(compared: Comparison) -> str | None:
    if compared.high < 1 and compared.paired_ratio < 1 - WORTH_CHOOSING:
        return "hierarchical"
    if compared.low > 1 and compared.paired_ratio > 1 + WORTH_CHOOSING:
        return "flat"
    return None

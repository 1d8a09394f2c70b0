"""What the parts gain, best already, drift and warm start of ``benchmarks/tuning.py`` show."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

NOTICED = 0.08  # the watch tells changes of 5 % and more from noise
Row = Mapping[str, Any]
Figures = Mapping[str, str]


def _share(rows: list[Row], test: Callable[[Row], bool]) -> str:
    return f"{sum(test(row) for row in rows) / len(rows):.1%}"


def _typical(rows: list[Row], key: str, form: str = ".1f") -> str:
    """Median and most."""
    values = [row[key] if row[key] is not None else math.inf for row in rows]
    return f"{statistics.median(values):{form}} ({max(values):{form}})"


def figures_of_tunings(rows: list[Row]) -> Figures:
    """Of jobs tuned once."""
    asked = [1e3 * seconds for row in rows for seconds in row["decision_seconds"]]
    lost = sorted(row["lost_steps"] for row in rows)
    winners = [row for row in rows if row["kept"] == "winner"]
    found = {
        "jobs": str(len(rows)),
        "kept within 1 % of the best": _share(rows, lambda r: r["kept_over_best"] <= 0.01),
        "kept within 2 % of the best": _share(rows, lambda r: r["kept_over_best"] <= 0.02),
        "slower than the baseline by over 1 %": _share(rows, lambda r: r["true_speedup"] < 0.99),
        "true speed-up": _typical(rows, "true_speedup", ".3f"),
        "steps from first to last switch": _typical(rows, "steps", ".0f"),
        "trials": _typical(rows, "trials", ".0f"),
        "steps lost": _typical(rows, "lost_steps"),
        "steps lost, 95 % below": f"{lost[int(0.95 * (len(lost) - 1))]:.1f}",
        "decision, ms": f"{statistics.median(asked):.0f} ({max(asked):.0f})",
    }
    if winners:
        found["winners in their interval"] = _share(winners, lambda r: r["is_in_interval"])
    return found


def figures_of_drift(rows: list[Row]) -> Figures:
    changed = [row for row in rows if row["change"] > NOTICED]
    return {
        "jobs": str(len(rows)),
        f"of those slower by over {NOTICED:.0%}": str(len(changed)),
        "new round begins after steps": _typical(changed, "began_after_steps", ".0f"),
        "old setting over the new best": _typical(changed, "old_over_new_best", ".1%"),
        "kept over the new best": _typical(changed, "kept_over_new_best", ".1%"),
        "rounds in all quiet steps": str(sum(row["rounds_when_quiet"] for row in rows)),
        "rounds after disturbances": str(sum(row["rounds_when_disturbed"] for row in rows)),
    }


def figures_of_warm_starts(rows: list[Row]) -> Figures:
    return {
        "jobs": str(len(rows)),
        "at the first run's best from the first switch on": _share(
            rows, lambda r: r["stays_from_first_switch"]
        ),
        "trials of the first run": _typical(rows, "first_trials", ".0f"),
        "trials of the second run": _typical(rows, "second_trials", ".0f"),
        "steps lost in the first run": _typical(rows, "first_lost_steps"),
        "steps lost in the second run": _typical(rows, "second_lost_steps"),
        "trials of a similar job": _typical(rows, "similar_trials", ".0f"),
        "steps lost in a similar job": _typical(rows, "similar_lost_steps"),
    }


FIGURES: Mapping[str, Callable[[list[Row]], Figures]] = {
    "gain": figures_of_tunings,
    "best already": figures_of_tunings,
    "drift": figures_of_drift,
    "warm start": figures_of_warm_starts,
}

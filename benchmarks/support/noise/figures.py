"""What many tunings under noise show: figures by climate and by kind of truth, as tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median

from benchmarks.support.harness import print_table
from benchmarks.support.noise.jobs import SLOWER, Row

ALL = "all of them"
Figures = Mapping[str, str]


def figures(rows: Sequence[Row]) -> Figures:
    """Of tunings in weather."""
    winners = [row for row in rows if row["kept"] == "winner"]
    steps, regrets = [row["steps"] for row in rows], [row["regret"] for row in rows]
    return {
        "tunings": str(len(rows)),
        f"{SLOWER:.1%} slower than default": _share(rows, "is_slower"),
        "claims that hold": f"{_share(winners, 'is_in_interval')} of {len(winners)}",
        "steps: median, 95th": f"{median(steps):.0f}, {percentile(steps, 0.95):.0f}",
        "lost: median, 95th": _lost(rows),
        "regret: mean, median, 95th": f"{fmean(regrets):.1%}, {median(regrets):.1%}, "
        f"{percentile(regrets, 0.95):.1%}",
        "within 2 %": f"{fmean(regret <= 0.02 for regret in regrets):.0%}",
        "within 5 %": f"{fmean(regret <= 0.05 for regret in regrets):.0%}",
    }


def figures_of_bad_moments(rows: Sequence[Row]) -> Figures:
    """Of tunings whose first visit to the best level met a bad moment."""
    visits = [row["visits"] for row in rows]
    return {
        **figures(rows),
        "visited": f"{fmean(count > 0 for count in visits):.0%}",
        "visited again": f"{fmean(count > 1 for count in visits):.0%}",
        "ends at the level": _share(rows, "has_level"),
    }


def grouped(rows: Sequence[Row], key: str) -> dict[str, list[Row]]:
    """By what stands under the key, in the order in which that first occurs; then all."""
    names = dict.fromkeys(row[key] for row in rows)
    found = {name: [row for row in rows if row[key] == name] for name in names}
    return {**found, ALL: list(rows)} if rows else {}


def of_noise(rows: Sequence[Row]) -> dict[str, Figures]:
    """By climate, of all, and by kind of truth."""
    found = {name: figures(own) for name, own in grouped(rows, "climate").items()}
    kinds = grouped(rows, "truth")
    return found | {kind: figures(kinds[kind]) for kind in sorted(kinds) if kind != ALL}


def of_bad_moments(rows: Sequence[Row]) -> dict[str, Figures]:
    """By the level that is best, and of all."""
    return {name: figures_of_bad_moments(own) for name, own in grouped(rows, "level").items()}


def show(title: str, found: Mapping[str, Figures]) -> None:
    """A line for each group."""
    if found:
        columns = list(next(iter(found.values())))
        rows = [(name, *(own[column] for column in columns)) for name, own in found.items()]
        print()
        print_table((title, *columns), rows)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def _lost(rows: Sequence[Row]) -> str:
    lost = [row["lost_steps"] for row in rows]
    return f"{median(lost):.1f}, {percentile(lost, 0.95):.1f}"


def _share(rows: Sequence[Row], key: str) -> str:
    return f"{fmean(bool(row[key]) for row in rows):.1%}" if rows else "none"

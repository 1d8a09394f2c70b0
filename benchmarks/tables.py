"""What the search benchmark prints: figures by engine, and whether the goals are met."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from engines import PEERS
from landscape import SPACES
from rich.console import Console
from rich.table import Table
from runs import TOLERANCES, Figures, Run

GOAL_NOISE = 0.05
PROPOSAL_MS = 50
MOST_LOST_BY_WRONG_MODEL = 1.1
Group = tuple[str, bool, float]
Goal = tuple[str, str, bool]
"""What is asked for, what was found, and whether that meets it."""


def by_group(runs: Iterable[Run]) -> dict[Group, dict[str, Figures]]:
    """Figures of each engine by space, network (rippled or not) and noise."""
    grouped: dict[Group, dict[str, list[Run]]] = {}
    for run in runs:
        setting = run.setting
        group = setting.space, setting.is_rippled, setting.noise
        grouped.setdefault(group, {}).setdefault(setting.engine, []).append(run)
    return {
        group: {engine: Figures.of(members) for engine, members in grouped[group].items()}
        for group in sorted(grouped, key=lambda g: ([*SPACES].index(g[0]), *g[1:]))
    }


def show(runs: Sequence[Run]) -> None:
    """A table for each space and noise, then the goals."""
    trials = runs[0].setting.trials
    groups = by_group(runs)
    for (space, _, noise), engines in groups.items():
        _print(
            f"{space} space ({', '.join(SPACES[space])}), {noise:.0%} noise: "
            f"{trials} trials in {_count(engines)} runs",
            [
                "engine",
                *(f"to within {t:.0%}" for t in TOLERANCES),
                *(f"ends within {t:.0%}" for t in TOLERANCES),
                *("lost", "mean lost", "ms"),
            ],
            [
                [
                    engine,
                    *(_trials(of.trials_to_within[t], trials) for t in TOLERANCES),
                    *(f"{of.ends_within[t]:.0%}" for t in TOLERANCES),
                    *(f"{of.lost_steps:.2f}", f"{of.mean_lost_steps:.2f}"),
                    f"{of.decision_ms:.1f}",
                ]
                for engine, of in engines.items()
            ],
        )
    _print_goals(_goals(groups))


def show_wrong_models(runs: Sequence[Run]) -> None:
    """What each wrong model loses, against the plain process on the same network."""
    goals = []
    for (space, is_rippled, noise), engines in by_group(runs).items():
        plain = engines["plain"]
        network = "rippled" if is_rippled else "usual"
        rows = []
        for engine, of in engines.items():
            ratio = of.lost_steps / plain.lost_steps
            mean_ratio = of.mean_lost_steps / plain.mean_lost_steps
            lost = [f"{of.lost_steps:.2f}", f"{ratio:.2f}"]
            mean_lost = [f"{of.mean_lost_steps:.2f}", f"{mean_ratio:.2f}"]
            rows.append([engine, *lost, *mean_lost, f"{of.ends_within[0.02]:.0%}"])
            goals.append(
                (
                    f"{space}, {noise:.0%} noise, {network} network, {engine}: lost at most "
                    f"{MOST_LOST_BY_WRONG_MODEL} x plain's",
                    f"{ratio:.2f}",
                    ratio <= MOST_LOST_BY_WRONG_MODEL,
                )
            )
        _print(
            f"{space} space, {network} network, {noise:.0%} noise: {_count(engines)} runs",
            ["engine", "lost", "x plain", "mean lost", "x plain", "ends within 2%"],
            rows,
        )
    _print_goals([goal for goal in goals if ", plain:" not in goal[0]])


def as_json(runs: Sequence[Run]) -> dict[str, Any]:
    """Figures and every run; a trial that never came is null."""
    figures = [
        {"space": space, "is_rippled": is_rippled, "noise": noise, "engine": engine}
        | asdict(of)
        | {
            "trials_to_within": {
                str(t): n if math.isfinite(n) else None for t, n in of.trials_to_within.items()
            }
        }
        for (space, is_rippled, noise), engines in by_group(runs).items()
        for engine, of in engines.items()
    ]
    every = [
        asdict(run.setting)
        | {
            "excess": [round(excess, 5) for excess in run.excess],
            "final_excess": run.final_excess,
            "decision_ms": round(1000 * median(run.decision_seconds), 2),
        }
        for run in runs
    ]
    return {"figures": figures, "runs": every}


def _goals(groups: dict[Group, dict[str, Figures]]) -> list[Goal]:
    """Those that were asked for at 5 % noise, as far as the engines were run."""
    goals: list[Goal] = []
    small = groups.get(("small", False, GOAL_NOISE), {})
    large = groups.get(("large", False, GOAL_NOISE), {})
    for space, engines, tolerance, most in (("small", small, 0.02, 3), ("large", large, 0.01, 6)):
        if ours := engines.get("ours"):
            found = ours.trials_to_within[tolerance]
            goals.append(
                (f"{space}: within {tolerance:.0%} in {most} or less", f"{found:g}", found <= most)
            )
            is_quick = ours.decision_ms <= PROPOSAL_MS
            goals.append(
                (f"{space}: proposal in {PROPOSAL_MS} ms", f"{ours.decision_ms:.1f} ms", is_quick)
            )
    if ours := small.get("ours"):
        share = ours.ends_within[0.02]
        goals.append(("small: over 90% end within 2%", f"{share:.0%}", share > 0.9))
        if bagua := small.get("bagua"):
            goals.append(_lost("small: lost at most a tenth of bagua's", ours, bagua, 0.1))
    peers = [large[name] for name in PEERS if name in large]
    if (ours := large.get("ours")) and peers:
        best = min(peers, key=lambda of: of.lost_steps)
        goals.append(_lost("large: lost at most half of the best peer's", ours, best, 0.5))
    return goals


def _lost(what: str, ours: Figures, other: Figures, most: float) -> Goal:
    found = f"{ours.lost_steps:.2f} of {other.lost_steps:.2f}"
    return what, found, ours.lost_steps <= most * other.lost_steps


def _print_goals(goals: Sequence[Goal]) -> None:
    rows = [[what, found, "met" if is_met else "not met"] for what, found, is_met in goals]
    if rows:
        _print("goals (for 60 trials)", ["goal", "found", ""], rows)


def _print(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in ("engine", "goal") else "right")
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a file has no width to fit
    console.print(table)
    console.print()


def _trials(found: float, trials: int) -> str:
    return f"{found:g}" if math.isfinite(found) else f"over {trials}"


def _count(engines: dict[str, Figures]) -> int:
    return max(of.runs for of in engines.values())

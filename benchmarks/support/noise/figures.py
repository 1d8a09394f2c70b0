"""What many tunings under noise show: figures by climate and by kind of truth, as tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median, stdev

from benchmarks.support.harness import print_table
from benchmarks.support.noise.beside import joined
from benchmarks.support.noise.jobs import SLOWER, Row

ALL = "all of them"
NAME_OF_SLOWER = f"{SLOWER:.1%} slower than default"
NAME_OF_REGRET = "regret: mean, median, 95th"
Figures = Mapping[str, str]


def figures(rows: Sequence[Row]) -> Figures:
    """Of tunings in weather."""
    winners = [row for row in rows if row["kept"] == "winner"]
    regrets = [row["regret"] for row in rows]
    return {
        "tunings": str(len(rows)),
        NAME_OF_SLOWER: _share(rows, "is_slower"),
        "claims that hold": f"{_share(winners, 'is_in_interval')} of {len(winners)}",
        "steps: median, 95th": _steps(rows),
        "lost: median, 95th": _lost(rows),
        NAME_OF_REGRET: f"{fmean(regrets):.1%}, {median(regrets):.1%}, "
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
    """By the level that is best, of all, and of all without the bad moment."""
    found = {name: figures_of_bad_moments(own) for name, own in grouped(rows, "level").items()}
    controls = [row["control"] for row in rows if row["control"]]
    return found | ({"without": figures_of_bad_moments(controls)} if controls else {})


def of_earlier_jobs(rows: Sequence[Row]) -> dict[str, Figures]:
    """By what the earlier job was, beside the same jobs without one."""
    return {
        name: {
            "jobs": str(len(own)),
            "steps alone": _steps([row["fresh"] for row in own]),
            "steps after it": _steps(own),
            "after over alone": f"{_ratio(own, 'steps'):.2f}",
            "lost steps alone": _lost([row["fresh"] for row in own]),
            "lost steps after it": _lost(own),
            "regret alone": f"{fmean(row['fresh']['regret'] for row in own):.1%}",
            "regret after it": f"{fmean(row['regret'] for row in own):.1%}",
            NAME_OF_SLOWER: _share(own, "is_slower"),
        }
        for name, own in grouped(rows, "relation").items()
        if name != ALL
    }


def of_searches(rows: Sequence[Row], others: Sequence[Row]) -> dict[str, Figures]:
    """Ours, that of the other checkout, and the rivals, after the same steps as ours."""
    searches = {"ours": list(rows)}
    if others:
        searches["ours, beside"] = list(others)
    for name in rows[0]["rivals"]:
        searches[name] = [{**row, **row["rivals"][name]} for row in rows]
    return {name: _of_search(own) for name, own in searches.items()}


def _of_search(rows: Sequence[Row]) -> Figures:
    found = figures(rows)
    asked = ("tunings", NAME_OF_REGRET, NAME_OF_SLOWER, "within 2 %", "within 5 %")
    kinds = {name: own for name, own in sorted(grouped(rows, "truth").items()) if name != ALL}
    return {name: found[name] for name in asked} | {
        f"2 %: {kind}": f"{fmean(row['regret'] <= 0.02 for row in own):.0%}"
        for kind, own in kinds.items()
    }


# Parts with figures by group.
GROUPED: Mapping[str, Callable[[Sequence[Row]], dict[str, Figures]]] = {
    "noise": of_noise,
    "bad moment": of_bad_moments,
    "earlier jobs": of_earlier_jobs,
}


def show_all(
    parts: Mapping[str, Sequence[Row]], others: Mapping[str, Sequence[Row]]
) -> dict[str, Figures]:
    """Print a table for each part with groups, what ran beside it in the line below; all lines."""
    shown: dict[str, Figures] = {}
    for part in filter(parts.__contains__, GROUPED):
        rows, besides = joined(parts[part], others[part]) if part in others else (parts[part], ())
        lines = dict(GROUPED[part](rows))
        beside = GROUPED[part](besides) if besides else {}
        if beside:
            lines = {
                key: own
                for name in lines
                for key, own in ((name, lines[name]), (f"  {name}, beside", beside[name]))
            }
        _show(part, lines)
        if besides:
            print(f"{part}: against what ran beside it, on average: {difference(rows, besides)}")
        shown |= {f"{part}: {name.strip()}": own for name, own in lines.items()}
        if part == "noise" and (rows[0]["rivals"] or besides):
            searches = of_searches(rows, besides)
            _show("search", searches)
            shown |= {f"search: {name}": own for name, own in searches.items()}
    return shown


def difference(rows: Sequence[Row], besides: Sequence[Row]) -> str:
    """Of ours to what ran beside it, tuning by tuning, with two standard errors."""
    told = []
    for key, scale, unit in (("regret", 100, " %"), ("steps", 1, "")):
        pairs = zip(rows, besides, strict=True)
        apart = [scale * (row[key] - other[key]) for row, other in pairs]
        error = 2 * stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else math.inf
        told.append(f"{key} {fmean(apart):+.1f}{unit} (±{error:.1f})")
    return ", ".join(told)


def _show(title: str, found: Mapping[str, Figures]) -> None:
    columns = list(next(iter(found.values())))
    rows = [(name, *(own[column] for column in columns)) for name, own in found.items()]
    print()
    print_table((title, *columns), rows)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def _steps(rows: Sequence[Row]) -> str:
    steps = [row["steps"] for row in rows]
    return f"{median(steps):.0f}, {percentile(steps, 0.95):.0f}"


def _ratio(rows: Sequence[Row], key: str) -> float:
    """Of the sums after an earlier job and alone."""
    return sum(row[key] for row in rows) / sum(row["fresh"][key] for row in rows)


def _lost(rows: Sequence[Row]) -> str:
    lost = [row["lost_steps"] for row in rows]
    return f"{median(lost):.1f}, {percentile(lost, 0.95):.1f}"


def _share(rows: Sequence[Row], key: str) -> str:
    return f"{fmean(bool(row[key]) for row in rows):.1%}" if rows else "none"

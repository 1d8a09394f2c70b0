"""What tunings under noise show, also beside another checkout's: by climate and kind of truth."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, stdev

import bagua_autotune
import bagua_simulator
from benchmarks.support.harness import print_table
from benchmarks.support.noise.tunings import SLOWER, Row

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "benchmarks" / "tuning.py"
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


def show(rows: Sequence[Row], others: Sequence[Row]) -> dict[str, Figures]:
    """Print a table, what ran beside each line below it, and one of the searches; all lines."""
    besides: Sequence[Row] = ()
    if others:
        rows, besides = joined(rows, others)
    lines = dict(of_noise(rows))
    if besides:
        beside = of_noise(besides)
        lines = {
            key: own
            for name in lines
            for key, own in ((name, lines[name]), (f"  {name}, beside", beside[name]))
        }
    _print("noise", lines)
    if besides:
        print(f"noise: against what ran beside it, on average: {difference(rows, besides)}")
    shown = {f"noise: {name.strip()}": own for name, own in lines.items()}
    if rows[0]["rivals"] or besides:
        searches = of_searches(rows, besides)
        _print("search", searches)
        shown |= {f"search: {name}": own for name, own in searches.items()}
    return shown


def _print(title: str, lines: Mapping[str, Figures]) -> None:
    columns = list(next(iter(lines.values())))
    print()
    print_table((title, *columns), [(n, *(own[c] for c in columns)) for n, own in lines.items()])


def difference(rows: Sequence[Row], besides: Sequence[Row]) -> str:
    """Of ours to what ran beside it, tuning by tuning, with two standard errors."""
    told = []
    for key, scale, unit in (("regret", 100, " %"), ("steps", 1, "")):
        pairs = zip(rows, besides, strict=True)
        apart = [scale * (row[key] - other[key]) for row, other in pairs]
        error = 2 * stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else math.inf
        told.append(f"{key} {fmean(apart):+.1f}{unit} (±{error:.1f})")
    return ", ".join(told)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def _steps(rows: Sequence[Row]) -> str:
    steps = [row["steps"] for row in rows]
    return f"{median(steps):.0f}, {percentile(steps, 0.95):.0f}"


def _lost(rows: Sequence[Row]) -> str:
    lost = [row["lost_steps"] for row in rows]
    return f"{median(lost):.1f}, {percentile(lost, 0.95):.1f}"


def _share(rows: Sequence[Row], key: str) -> str:
    return f"{fmean(bool(row[key]) for row in rows):.1%}" if rows else "none"


def source_root() -> Path:
    """The checkout whose service this process runs."""
    return Path(bagua_autotune.__file__).resolve().parents[2]


def rows_of(checkout: Path, arguments: Sequence[str]) -> dict[str, list[Row]]:
    """By part, of ``benchmarks/tuning.py`` with these arguments, by the checkout's service;
    the benchmark and the simulator are those of this process.

    Raises:
        RuntimeError: it failed, or ran another service than that of the checkout.
    """
    with tempfile.TemporaryDirectory() as folder:
        # The truth must be the same, whatever simulator the checkout has.
        (Path(folder) / "bagua_simulator").symlink_to(Path(bagua_simulator.__file__).parent)
        paths = (Path(folder), checkout / "autotune", checkout / "client", ROOT)
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(str(p.resolve()) for p in paths)}
        written = Path(folder) / "beside.json"
        command = [sys.executable, str(SCRIPT), *arguments, "--json", str(written)]
        if subprocess.run(command, env=variables, stdout=subprocess.DEVNULL).returncode:
            raise RuntimeError(f"the tunings of {checkout} failed")
        found = json.loads(written.read_text())
    if Path(found["service"]) != checkout.resolve():
        raise RuntimeError(f"the service of {found['service']} ran in place of that of {checkout}")
    parts: dict[str, list[Row]] = found["parts"]
    return parts


def joined(rows: Sequence[Row], others: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Both with the regret against the best of what either may choose.

    Raises:
        ValueError: they are not of the same jobs.
    """
    mine: list[Row] = []
    theirs: list[Row] = []
    for row, other in zip(rows, others, strict=True):
        for key in ("problem", "seed", "baseline_seconds"):
            if row[key] != other[key]:
                raise ValueError(f"{key}: {row[key]} beside {other[key]}; not the same job")
        best = min(row["best_seconds"], other["best_seconds"])
        mine.append({**row, "regret": row["kept_seconds"] / best - 1})
        theirs.append({**other, "regret": other["kept_seconds"] / best - 1})
    return mine, theirs

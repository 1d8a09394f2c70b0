"""Prints what the cells showed: for a terminal, or as reports/2026-11-hosts.md holds it."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.support.harness import print_table

from ..arms import TUNED
from .figures import Figures
from .goals import Goal, judged
from .tables import Table, beside, choices, means, speedups, step_times, stock_sizes, tunings


def headline(cell: Figures) -> str:
    """A cell in a line."""
    speedups = f"{cell.over_stock.found.paired_ratio:.3f}x over stock's default, "
    best_stock = cell.over_best_stock
    speedups += f"{best_stock.found.paired_ratio:.3f}x over its best size ({best_stock.over})"
    best = f"{cell.tuned_over_best.paired_ratio:.3f} of the sweep's best ({cell.best})"
    tuning = f"{'' if cell.tuning['ended'] else 'over '}{cell.tuning_steps} steps of tuning"
    milliseconds = 1e3 * cell.run_off[TUNED].seconds
    return f"{milliseconds:.1f} ms when tuned: {speedups}, {best}; {tuning}"


def show(
    cells: Sequence[Figures],
    goals: Sequence[Goal],
    as_markdown: bool = False,
) -> None:
    """Print where it was measured, the means, the tables of each network and of all, the goals; of
    at least one cell."""
    heading = "### {}\n" if as_markdown else "\n== {} =="
    print_one = _print_markdown if as_markdown else _print_plain
    for line in machines(cells):
        print(line)
    print()
    print_one(means(cells))
    for network in dict.fromkeys(cell.cell.network for cell in cells):
        here = [cell for cell in cells if cell.cell.network == network]
        print(heading.format(network))
        for line in links(here):
            print(line + "\n")
        for table in (step_times(here), speedups(here)):
            print_one(table)
    print(heading.format("All networks"))
    for table in (stock_sizes(cells), choices(cells), tunings(cells), beside(cells)):
        if table.rows:
            print_one(table)
    found = [[str(goal.number), goal.what, goal.verdict, goal.found] for goal in goals]
    if as_markdown:
        print_one(Table("Goals", ["", "goal", "", "found"], found))
    else:
        print("\nGoals")
        for number, what, verdict, words in found:
            print(f"{number}  {verdict:<12}  {what}: {words}", flush=True)
    left_out = judged(cells)[1]
    if left_out:
        print(f"Goals and means leave out {', '.join(left_out)}.")


def machines(cells: Sequence[Figures]) -> list[str]:
    """Where cells were measured, as far as it is known, a line for each of the places."""
    lines: dict[str, None] = {}
    for cell in cells:
        known = cell.machine
        words = [
            str(known.get("processor", "")),
            f"{known['cpus']} cores" if "cpus" in known else "",
            str(known.get("device", "")) if cell.cell.device == "cuda" else "",
            f"Linux {known['kernel']}" if "kernel" in known else "",
            f"Python {known['python']}" if "python" in known else "",
            f"torch {known['torch']}" if "torch" in known else "",
            f"commit {known['commit']}" if known.get("commit") else "",
        ]
        lines[", ".join(filter(None, words))] = None
    return [f"Measured on {line}." for line in lines if line]


def links(cells: Sequence[Figures]) -> list[str]:
    """What the probe found between the hosts, of all cells that were probed."""
    found = [link for cell in cells if (link := cell.machine.get("link"))]
    if not found:
        return []
    rate = _range([link["bits_per_second"] / 1e6 for link in found], 0)
    delay = _range([link["round_trip_seconds"] * 1e3 for link in found], 2)
    return [f"The link as probed: {rate} Mbit/s of TCP, a round trip of {delay} ms."]


def _range(values: Sequence[float], digits: int) -> str:
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} to {high}"


def _print_plain(table: Table) -> None:
    print(f"\n{table.title}")
    print_table(table.header, table.rows)


def _print_markdown(table: Table) -> None:
    """A paragraph and a table."""
    lines = ["| " + " | ".join(cells) + " |" for cells in [table.header, *table.rows]]
    lines.insert(1, "|" + "---|" * len(table.header))
    print("\n".join([f"{table.title}:", "", *lines, ""]))

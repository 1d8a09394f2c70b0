"""The bench's tables, for a terminal or as Markdown, from the figures of its cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness import print_table

from bagua_client import Configuration

from .arms import BAGUA_DEFAULT, COMPUTE, STOCK_DEFAULT, TUNED
from .figures import Figures
from .goals import Goal, with_interval
from .spread import Spread

Table = tuple[str, Sequence[str], list[list[str]]]
"""Title, header and rows."""


def headline(cell: Figures) -> str:
    """A cell in a line."""
    speedups = f"{cell.speedup_over_stock.paired_ratio:.3f}x over stock, "
    speedups += f"{cell.speedup_over_bagua_default.paired_ratio:.3f}x over ours at 10 MiB"
    best = f"{cell.tuned_over_best.paired_ratio:.3f} of the sweep's best ({cell.best})"
    tuning = f"{'' if cell.tuning['ended'] else 'over '}{cell.tuning_steps} steps of tuning"
    return f"{_ms(cell.run_off[TUNED])} ms when tuned: {speedups}, {best}; {tuning}"


def show(cells: Sequence[Figures], goals: Sequence[Goal], as_markdown: bool = False) -> None:
    """Print step times, speed-ups and tunings, then the goals."""
    for title, header, rows in (_step_times(cells), _ratios(cells), _tunings(cells)):
        if as_markdown:
            print(markdown(title, header, rows))
        else:
            print(f"\n{title}")
            print_table(header, rows)
    if as_markdown:
        found = [[str(goal.number), goal.what, goal.verdict, goal.found] for goal in goals]
        print(markdown("Goals", ["", "goal", "", "found"], found))
        return
    print("\nGoals")
    for goal in goals:
        print(f"{goal.number}  {goal.verdict:<12}  {goal.what}: {goal.found}", flush=True)


def markdown(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A paragraph and a table, as docs/performance.md holds them."""
    lines = ["| " + " | ".join(cells) + " |" for cells in [header, *rows]]
    lines.insert(1, "|" + "---|" * len(header))
    return "\n".join([f"{title}:", "", *lines, ""])


def _step_times(cells: Sequence[Figures]) -> Table:
    title = "Milliseconds per step in the run-off, median ± median absolute deviation"
    header = ["cell", "computing alone", "stock default", "ours 10 MiB", "best of the sweep",
              "tuned"]  # fmt: skip
    rows = [
        [
            _name(cell),
            _ms(cell.run_off[COMPUTE]),
            _ms(cell.run_off[STOCK_DEFAULT]),
            _ms(cell.run_off[BAGUA_DEFAULT]),
            f"{_ms(cell.run_off[cell.best])}, {cell.best}",
            _ms(cell.run_off[TUNED]),
        ]
        for cell in cells
    ]
    return title, header, rows


def _ratios(cells: Sequence[Figures]) -> Table:
    title = "Medians of the ratios of paired blocks, 95 % bootstrap interval"
    header = ["cell", "stock over computing", "tuned over best", "speed-up over stock default",
              "over ours at 10 MiB", "hierarchical over flat", "tuned to"]  # fmt: skip
    rows = [
        [
            _name(cell),
            f"{cell.stock_over_compute.paired_ratio:.2f}",
            with_interval(cell.tuned_over_best),
            with_interval(cell.speedup_over_stock),
            with_interval(cell.speedup_over_bagua_default),
            with_interval(cell.choice.hierarchical_over_flat) if cell.choice else "-",
            str(Configuration.from_json(cell.configuration)),
        ]
        for cell in cells
    ]
    return title, header, rows


def _tunings(cells: Sequence[Figures]) -> Table:
    title = "What the tunings took; cost is the time lost to trials, in steps of the default"
    header = ["cell", "trials", "steps, all", "first to last switch", "seconds", "cost in steps",
              "cost in s", "Bagua's steps", "Bagua's step over tuned"]  # fmt: skip
    return title, header, [_tuning_row(cell) for cell in cells]


def _tuning_row(cell: Figures) -> list[str]:
    tuning, stored = cell.tuning, cell.tuning["stored"]
    result: dict[str, Any] = stored["result"] or {}
    over = cell.bagua_over_tuned
    return [
        _name(cell),
        str(result.get("trials", len(stored["trials"]))),
        f"{cell.tuning_steps}" if tuning["ended"] else f"over {cell.tuning_steps}",
        str(cell.switch_steps),
        f"{tuning['tuning_seconds']:.0f}",
        f"{result['cost_steps']:.1f}" if result else "-",
        f"{result['cost_seconds']:.1f}" if result else "-",
        "-" if cell.bagua is None else _bagua_steps(cell.bagua),
        "-" if over is None else with_interval(over),
    ]


def _bagua_steps(bagua: dict[str, Any]) -> str:
    steps = str(bagua["tuning_steps"])
    return steps if bagua["ended"] else f"over {steps}"


def _name(cell: Figures) -> str:
    return f"{cell.cell.name} (loopback)" if cell.fallback else cell.cell.name


def _ms(found: Spread) -> str:
    return f"{1e3 * found.seconds:.1f} ± {1e3 * found.deviation_seconds:.1f}"

"""Prints what the cells showed: for a terminal, or as reports/2026-11-hosts.md has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bagua_client import Configuration
from benchmarks.support.cells.cell import (
    BAGUA_DEFAULT,
    COMPUTE,
    MIB,
    STOCK_DEFAULT,
    STOCK_DEFAULT_BYTES,
    TUNED,
)
from benchmarks.support.cells.figures import (
    Figures,
    Goal,
    SpeedUp,
    judged,
    mean_speedup,
    with_interval,
)
from benchmarks.support.harness import Spread, print_table

SPEEDUPS: dict[str, Callable[[Figures], SpeedUp]] = {
    "stock DDP, 25 MiB (its default)": lambda cell: cell.over_stock,
    "stock DDP, default scaled": lambda cell: cell.over_scaled_stock,
    "stock DDP, best size": lambda cell: cell.over_best_stock,
    "ours at 10 MiB (Bagua's default)": lambda cell: cell.over_bagua_default,
    "ours, Bagua's default scaled": lambda cell: cell.over_scaled_bagua_default,
}
"""What the tuned job is compared with, in the words of the tables."""


@dataclass(frozen=True)
class Table:
    """Rows as long as the header; the title is a sentence without its end."""

    title: str
    header: Sequence[str]
    rows: list[list[str]]


def means(cells: Sequence[Figures]) -> Table:
    """Of every network and of all, over the cells that count."""
    kept = [cell for cell in judged(cells)[0] if cell.cell.run == 1]
    exposed = [cell for cell in kept if cell.is_exposed]
    rows = []
    for network in [*dict.fromkeys(cell.cell.network for cell in kept), "all"]:
        here = [cell for cell in exposed if network in ("all", cell.cell.network)]
        of = [cell for cell in kept if network in ("all", cell.cell.network)]
        found = [
            f"{mean_speedup(map(get, here)):.2f}" if here else "-" for get in SPEEDUPS.values()
        ]
        rows.append([network, f"{len(here)} of {len(of)}", *found])
    title = (
        "How many times as fast as these the tuned job is: geometric means over the cells where "
        "communication is exposed"
    )
    return Table(title, ["network", "exposed cells", *SPEEDUPS], rows)


def step_times(cells: Sequence[Figures]) -> Table:
    """Of the run-off."""
    rounds = cells[0].tuned_over_best.pairs
    title = (
        f"Milliseconds per step, median ± median absolute deviation of {rounds} rounds (run-off)"
    )
    header = ["cell", "computing alone", "stock default", "ours at 10 MiB", "best of the sweep",
              "tuned", "tuned over best"]  # fmt: skip
    rows = [
        [
            cell_name(cell),
            _ms(cell.run_off[COMPUTE]),
            _ms(cell.run_off[STOCK_DEFAULT]),
            _ms(cell.run_off[BAGUA_DEFAULT]),
            f"{_ms(cell.run_off[cell.best])}, {cell.best}",
            _ms(cell.run_off[TUNED]),
            with_interval(cell.tuned_over_best),
        ]
        for cell in cells
    ]
    return Table(title, header, rows)


def speedups(cells: Sequence[Figures]) -> Table:
    """Of every cell, over all that it is compared with."""
    title = (
        "How many times as fast the tuned job is: median of the ratios of paired blocks (95 % "
        "bootstrap interval; what the run-off lacks comes from the sweep, with the range of its "
        "rounds)"
    )
    rows = [[cell_name(c), *(_over(what, get(c)) for what, get in SPEEDUPS.items())] for c in cells]
    return Table(title, ["cell", *SPEEDUPS], rows)


def stock_sizes(cells: Sequence[Figures]) -> Table:
    """Stock DDP of the sweep, beside the tuned job."""
    names = [name for name in cells[0].sweep if name.startswith("stock")]
    default = STOCK_DEFAULT_BYTES // MIB
    sizes = sorted(names, key=lambda n: default if n == STOCK_DEFAULT else int(n.split()[1]))
    title = "Stock DDP at other sizes, milliseconds per step in the sweep"
    rows = [
        [cell_name(cell), *(_ms(cell.sweep[size]) if size in cell.sweep else "-" for size in sizes),
         _ms(cell.sweep[TUNED])]
        for cell in cells
    ]  # fmt: skip
    header = [
        f"{default} MiB (default)" if size == STOCK_DEFAULT else size.removeprefix("stock ")
        for size in sizes
    ]
    return Table(title, ["cell", *header, "tuned"], rows)


def choices(cells: Sequence[Figures]) -> Table:
    """What the tuner chose, beside what the sweep says of the ways to reduce."""
    title = "What the tuner left the job at, and the ways to reduce, each at its best size"
    header = ["cell", "tuned to", "best flat", "best hierarchical", "hierarchical over flat",
              "stage", "winner"]  # fmt: skip
    rows = []
    for cell in cells:
        row = [cell_name(cell), str(Configuration.from_json(cell.configuration))]
        choice = cell.choice
        if choice is None:
            rows.append([*row, *["-"] * 5])
            continue
        over = with_interval(choice.hierarchical_over_flat)
        found = [choice.flat, choice.hierarchical, over, choice.stage, choice.winner or "neither"]
        rows.append([*row, *found])
    return Table(title, header, rows)


def tunings(cells: Sequence[Figures]) -> Table:
    """What they took, and Bagua's own beside them."""
    title = (
        "What the tunings took; the bill is the time lost to trials, in steps of the 25 MiB "
        "default; after it: the job's own step, over the run-off's"
    )
    header = ["cell", "trials", "steps", "first to last switch", "seconds", "bill in steps",
              "bill in s", "after it"]  # fmt: skip
    return Table(title, header, [_tuning_row(cell) for cell in cells])


def _tuning_row(cell: Figures) -> list[str]:
    tuning, stored = cell.tuning, cell.tuning["stored"]
    result: dict[str, Any] = stored["result"] or {}
    return [
        cell_name(cell),
        str(result.get("trials", len(stored["trials"]))),
        f"{cell.tuning_steps}" if tuning["ended"] else f"over {cell.tuning_steps}",
        str(cell.switch_steps),
        f"{tuning['tuning_seconds']:.0f}",
        f"{result['cost_steps']:.1f}" if result else "no result",
        f"{result['cost_seconds']:.1f}" if result else "-",
        "-" if cell.own_after is None else f"{cell.own_after:.2f}",
    ]


def beside(cells: Sequence[Figures]) -> Table:
    """16 bits on the wire, of the cells where that was measured."""
    title = (
        "Milliseconds per step of the tuned job where 16 bits on the wire are allowed, which "
        "changes the numbers"
    )
    header = ["cell", "torch's bf16 hook", "16 bits allowed", "over stock default",
              "over torch's bf16 hook", "tuned to", "steps"]  # fmt: skip
    return Table(
        title, header, [_beside_row(cell) for cell in cells if cell.compressed or cell.allowed]
    )


def _beside_row(cell: Figures) -> list[str]:
    compressed, allowed = cell.compressed, cell.allowed
    row = [cell_name(cell), "-" if compressed is None else _ms(compressed)]
    if allowed is None:
        return [*row, *["-"] * 5]
    over = allowed.over_compressed
    return [
        *row,
        _ms(allowed.step),
        with_interval(allowed.over_stock),
        "-" if over is None else with_interval(over),
        str(Configuration.from_json(allowed.configuration)),
        f"{'' if allowed.tuning['ended'] else 'over '}{allowed.tuning['tuning_steps']}",
    ]


def cell_name(cell: Figures) -> str:
    """With what it lacks."""
    return f"{cell.cell.name} (loopback)" if cell.fallback else cell.cell.name


def _over(what: str, speedup: SpeedUp) -> str:
    """With the arm, where the column does not say which."""
    found = with_interval(speedup.found)
    return found if "MiB" in what else f"{found}, {speedup.over}"


def _ms(found: Spread) -> str:
    return f"{1e3 * found.seconds:.1f} ± {1e3 * found.deviation_seconds:.1f}"


def headline(cell: Figures) -> str:
    """A cell in a line."""
    speedups = f"{cell.over_stock.found.paired_ratio:.3f}x over stock's default, "
    best_stock = cell.over_best_stock
    speedups += f"{best_stock.found.paired_ratio:.3f}x over its best size ({best_stock.over})"
    best = f"{cell.tuned_over_best.paired_ratio:.3f} of the sweep's best ({cell.best})"
    tuning = f"{'' if cell.tuning['ended'] else 'over '}{cell.tuning_steps} steps of tuning"
    milliseconds = 1e3 * cell.run_off[TUNED].seconds
    return f"{milliseconds:.1f} ms when tuned: {speedups}, {best}; {tuning}"


def show(cells: Sequence[Figures], goals: Sequence[Goal], as_markdown: bool = False) -> None:
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

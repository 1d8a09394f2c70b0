"""The simulator beside what Bagua's authors published: speed-ups of algorithms on 128 V100.

Two things are fitted to each published figure, as a recorded profile would give them: how long
computing takes, and the rate of one collective. All other rows are predictions. A deviation above
15 % is marked, and a published step that is shorter than its bytes need on a full link. One row
tries a cause: weights that travel beside computing.

    python benchmarks/published.py --json published.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1]))  # where benchmarks and tests are

from benchmarks.support.harness import write_json
from benchmarks.support.published import FIGURES, SIGNIFICANT, Figure, Row


def note(row: Row) -> str:
    """What there is to say of a row."""
    if row.is_given:
        return "fitted"
    if row.is_cause:
        return "not as released"
    if row.is_too_fast:
        return "shorter than its bytes need"
    return "above 15 %" if abs(row.deviation) > SIGNIFICANT else ""


def summary(rows: Sequence[Row]) -> str:
    """How many predictions hold."""
    predicted = [row for row in rows if not (row.is_given or row.is_cause)]
    within = [row for row in predicted if abs(row.deviation) <= SIGNIFICANT]
    too_fast = [row for row in predicted if row.is_too_fast]
    return (
        f"{len(within)} of {len(predicted)} predictions are within 15 %; {len(too_fast)} published "
        "steps are shorter than their bytes need"
    )


def show(figure: Figure, rows: Sequence[Row], console: Console) -> None:
    """Print a figure's rows."""
    factor, flow = figure.fitted
    table = Table("Gbit/s", "algorithm", "published", "simulated", "deviation", "note", box=None)
    for column in table.columns:
        column.no_wrap = True
    for row in rows:
        table.add_row(
            f"{row.gbit:g}", row.way, f"{row.published:.2f}x", f"{row.simulated:.2f}x",
            f"{row.deviation:+.0%}", note(row),
        )  # fmt: skip
    console.print(f"{figure.name}, speed-ups over {figure.base} ({figure.source})", soft_wrap=True)
    console.print(
        f"fitted: computing {factor:.2f} times the catalog's, one collective at "
        f"most {flow / 1e9:.2f} GB/s"
    )
    console.print(table)
    console.print(summary(rows))


def as_json(figure: Figure, rows: Sequence[Row]) -> dict[str, object]:
    """A figure and its rows."""
    factor, flow = figure.fitted
    return {
        "figure": figure.name,
        "source": figure.source,
        "base": figure.base,
        "compute_factor": factor,
        "flow_bytes_per_second": flow,
        "rows": [
            {
                "gbit_per_second": row.gbit,
                "algorithm": row.way,
                "published": row.published,
                "simulated": row.simulated,
                "deviation": row.deviation,
                "note": note(row),
            }
            for row in rows
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = {figure.name: figure.rows() for figure in FIGURES}
    console = Console()
    for figure in FIGURES:
        show(figure, rows[figure.name], console)
        console.print()
    if options.json:
        found = [as_json(figure, rows[figure.name]) for figure in FIGURES]
        write_json(options.json, {"figures": found})


if __name__ == "__main__":
    main()

"""Step times that a profile of one job predicts, beside those that another cell measured.

The profile is what a tuning left behind, say on two hosts of one GPU. The cell is a sweep of
``benchmarks/gain.py``, say on two nodes of two. Nothing of the cell is used but its shape. Measured
are medians of all its steps; the range is of all these steps, too.

    python benchmarks/predicted.py build/gain/vgg16-unshaped-2x1-cuda/profile.json \\
        build/gain/vgg16-unshaped-2x2-cuda.json --json predicted.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1]))  # where benchmarks and tests are

from bagua_autotune.model.knobs import Value
from bagua_simulator import Simulator
from bagua_simulator.measured.fitting import fit_record
from bagua_simulator.measured.recorded import load_record
from benchmarks.support.cells.arms import MIB, WAYS
from benchmarks.support.harness import write_json

WANTED = 0.1
STOCK_MIB = 25


@dataclass(frozen=True)
class Row:
    """One setting of a cell.

    Attributes:
        group: its way of reducing and number of channels.
        low_seconds, high_seconds: the shortest and the longest of the measured steps.
        sent_bytes, measured_sent_bytes: over each node's link, in a step.
    """

    name: str
    group: str
    simulated_seconds: float
    measured_seconds: float
    low_seconds: float
    high_seconds: float
    steps: int
    sent_bytes: float
    measured_sent_bytes: float

    @property
    def deviation(self) -> float:
        return self.simulated_seconds / self.measured_seconds - 1

    @property
    def sent_deviation(self) -> float:
        return self.sent_bytes / self.measured_sent_bytes - 1


def knobs_of(arm: Mapping[str, Any]) -> dict[str, Value] | None:
    """The configuration of an arm that sums up gradients as they are; None for another."""
    if arm["kind"] == "stock":
        size = (arm["bucket_mib"] or STOCK_MIB) * MIB
        return {"bucket_bytes": size, "first_bucket_bytes": MIB}
    if arm["kind"] != "ours" or arm["configuration"]["wire_precision"] != "as_is":
        return None
    given = arm["configuration"]
    sizes = ("bucket_bytes", "channels", "hierarchical", "first_bucket_bytes", "last_bucket_bytes")
    return {**{knob: given[knob] for knob in sizes}, "buckets": tuple(given["buckets"])}


def rows_of(simulator: Simulator, cell: Mapping[str, Any]) -> list[Row]:
    """Every setting that the sweep or the run-off of a cell measured."""
    found = []
    for name, arm in cell["arms"].items():
        knobs = knobs_of(arm)
        parts = [cell[part] for part in ("sweep", "run_off") if name in cell[part]["arms"]]
        if knobs is None or not parts:
            continue
        seconds = [each for part in parts for block in part["arms"][name] for each in block]
        sent = [each for part in parts for each in part["sent_bytes"][name]]
        found.append(
            Row(
                name,
                f"{WAYS[str(knobs.get('hierarchical', 'off'))]}, {knobs.get('channels', 1)}",
                simulator.step_seconds(knobs),
                median(seconds),
                min(seconds),
                max(seconds),
                len(seconds),
                simulator.sent_bytes(knobs),
                median(sent),
            )
        )
    return found


def summary(rows: Sequence[Row]) -> list[str]:
    """How many predictions hold: of each way and number of channels, and of all."""
    groups = {row.group: [each for each in rows if each.group == row.group] for row in rows}
    lines = []
    for group, own in {**groups, "all": list(rows)}.items():
        within = sum(abs(row.deviation) <= WANTED for row in own)
        middle = median(row.deviation for row in own)
        lines.append(f"{group}: {within} of {len(own)} within {WANTED:.0%}, median {middle:+.0%}")
    return lines


def show(rows: Sequence[Row], console: Console) -> None:
    table = Table("setting", "simulated ms", "measured ms", "range", "off", "MB sent", "off")
    table.box = None
    for column in table.columns:
        column.no_wrap = True
    for row in rows:
        table.add_row(
            row.name,
            f"{row.simulated_seconds * 1e3:.1f}",
            f"{row.measured_seconds * 1e3:.1f}",
            f"{row.low_seconds * 1e3:.0f} to {row.high_seconds * 1e3:.0f} of {row.steps}",
            f"{row.deviation:+.0%}",
            f"{row.measured_sent_bytes / 1e6:.1f}",
            f"{row.sent_deviation:+.1%}",
        )
    console.print(table)
    for line in summary(rows):
        console.print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("profile", type=Path, help="of 'export JOB --profile'")
    parser.add_argument("cell", type=Path, help="a cell's file of benchmarks/gain.py")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    cell = json.loads(options.cell.read_text())
    record = load_record(options.profile)
    fitted = fit_record(record).cluster
    place = cell["cell"]
    shape = {"nodes": place["nodes"], "ranks_per_node": place["ranks_per_node"]}
    rows = rows_of(record.simulator(replace(fitted, **shape)), cell)
    console = Console(soft_wrap=True)
    console.print(
        f"{record.job} on {shape['nodes']} x {shape['ranks_per_node']}: a channel "
        f"{fitted.flow_bytes_per_second / 1e9:.2f} GB/s, the link "
        f"{fitted.bandwidth_bytes_per_second / 1e9:.2f} GB/s"
    )
    show(rows, console)
    if options.json:
        write_json(options.json, {"cluster": asdict(fitted), "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()

"""Step times that a profile of one job predicts, beside those that others measured.

The profile is what a tuning left behind, say on two hosts of one GPU. What was measured, say on two
nodes of two, is a cell of ``benchmarks/gain.py``, which swept many settings in one process, or the
profile of a tuned job, whose trials are compared. Only its shape is used for the predictions.
Measured are medians of all steps with a setting; the range is of all these steps, too.

    python benchmarks/predicted.py build/gain/vgg16-unshaped-2x1-cuda/profile.json \\
        build/gain/vgg16-unshaped-2x2-cuda.json --json predicted.json
    python benchmarks/predicted.py build/gain/vgg16-unshaped-2x1-cuda/profile.json \\
        build/gain/vgg16-unshaped-2x2-cuda/profile.json

Where the two ran on different machines, ``--rates`` takes a channel's and the link's rate from
another profile, such as the measured job's own: what then is off is not the machine's doing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1]))  # where benchmarks and tests are

from bagua_autotune.model.knobs import Value
from bagua_autotune.model.text import describe
from bagua_simulator import Simulator
from bagua_simulator.measured.fitting import fit_record
from bagua_simulator.measured.recorded import load_record
from bagua_simulator.measured.step_times import StepTimes
from benchmarks.support.cells.arms import MIB, WAYS
from benchmarks.support.harness import print_table, write_json

WANTED = 0.1
STOCK_MIB = 25
RATES = ("flow_bytes_per_second", "bandwidth_bytes_per_second")


class Seconds(NamedTuple):
    """Of the steps with one setting: their median, the shortest and the longest, how many."""

    middle: float
    low: float
    high: float
    steps: int


@dataclass(frozen=True)
class Row:
    """One setting of a cell.

    Attributes:
        group: its way of reducing and number of channels.
        low_seconds, high_seconds: the shortest and the longest of the measured steps.
        sent_bytes, measured_sent_bytes: over each node's link, in a step; of a job's trials nobody
            counted them.
    """

    name: str
    group: str
    simulated_seconds: float
    measured_seconds: float
    low_seconds: float
    high_seconds: float
    steps: int
    sent_bytes: float
    measured_sent_bytes: float | None

    @property
    def deviation(self) -> float:
        return self.simulated_seconds / self.measured_seconds - 1

    @property
    def sent_deviation(self) -> float | None:
        """None: nothing is known to have been sent."""
        measured = self.measured_sent_bytes
        return self.sent_bytes / measured - 1 if measured else None


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


def shape_of(measured: Mapping[str, Any]) -> dict[str, int]:
    """Nodes and ranks of each, of a cell or of a job's profile.

    Raises:
        ValueError: the nodes of the job have different numbers of ranks.
    """
    if "cell" in measured:
        return {name: measured["cell"][name] for name in ("nodes", "ranks_per_node")}
    ranks = measured["ranks_per_node"]
    if len(set(ranks)) != 1:
        raise ValueError(f"a job with nodes of {ranks} ranks: only nodes of as many are simulated")
    return {"nodes": len(ranks), "ranks_per_node": ranks[0]}


def rows_of_job(simulator: Simulator, times: Sequence[StepTimes]) -> list[Row]:
    """Every setting that trials of a job measured while they summed up gradients as they are."""
    return [
        _row(
            simulator,
            describe(each.configuration),
            each.configuration,
            Seconds(each.seconds, each.low_seconds, each.high_seconds, each.steps),
        )
        for each in times
    ]


def _row(
    simulator: Simulator,
    name: str,
    knobs: Mapping[str, Value],
    measured: Seconds,
    sent_bytes: float | None = None,
) -> Row:
    return Row(
        name,
        f"{WAYS[str(knobs.get('hierarchical', 'off'))]}, {knobs.get('channels', 1)}",
        simulator.step_seconds(knobs),
        *measured,
        simulator.sent_bytes(knobs),
        sent_bytes,
    )


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
        middle = Seconds(median(seconds), min(seconds), max(seconds), len(seconds))
        found.append(_row(simulator, name, knobs, middle, median(sent)))
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


def show(rows: Sequence[Row]) -> None:
    print_table(
        ("setting", "simulated ms", "measured ms", "range", "off", "MB sent", "off"),
        [
            (
                row.name,
                f"{row.simulated_seconds * 1e3:.1f}",
                f"{row.measured_seconds * 1e3:.1f}",
                f"{row.low_seconds * 1e3:.0f} to {row.high_seconds * 1e3:.0f} of {row.steps}",
                f"{row.deviation:+.0%}",
                "-" if row.measured_sent_bytes is None else f"{row.measured_sent_bytes / 1e6:.1f}",
                "-" if row.sent_deviation is None else f"{row.sent_deviation:+.1%}",
            )
            for row in rows
        ],
    )
    for line in summary(rows):
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("profile", type=Path, help="of 'export JOB --profile'")
    parser.add_argument("measured", type=Path, help="a cell of gain.py, or as PROFILE")
    parser.add_argument("--rates", type=Path, metavar="PROFILE",
                        help="take a channel's and the link's rate from this one")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    measured = json.loads(options.measured.read_text())
    record = load_record(options.profile)
    fitted = fit_record(record).cluster
    if options.rates:
        of_machine = fit_record(load_record(options.rates)).cluster
        fitted = replace(fitted, **{rate: getattr(of_machine, rate) for rate in RATES})
    shape = shape_of(measured)
    simulator = record.simulator(replace(fitted, **shape))
    if "cell" in measured:
        rows = rows_of(simulator, measured)
    else:
        rows = rows_of_job(simulator, load_record(options.measured).step_times)
    print(
        f"{record.job} on {shape['nodes']} x {shape['ranks_per_node']}: a channel "
        f"{fitted.flow_bytes_per_second / 1e9:.2f} GB/s, the link "
        f"{fitted.bandwidth_bytes_per_second / 1e9:.2f} GB/s"
    )
    show(rows)
    if options.json:
        write_json(options.json, {"cluster": asdict(fitted), "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()

"""How fast each algorithm is at its best setting, compared with stock DDP and torch's own hooks.

    python benchmarks/algorithms.py                       # 100 Mbit/s, 1 Gbit/s, unshaped
    python benchmarks/algorithms.py --nodes 4 --ranks-per-node 1 --networks 1gbit --no-tuning
    python benchmarks/algorithms.py --device cuda --ranks-per-node 1 --models bert-base vgg16 \\
        --networks 10gbit --channels 8 --gpus 0 0

Each algorithm runs under a few settings (``--sizes-mib``, ``--channels``, flat and by node); the
fastest of each takes turns with the others in a run-off. A live tuning that may try all of them but
qadam, which needs its own optimizer, comes before that, and what it ends at takes part. On the CPU
models sleep instead of computing (see docs/method.md), and qadam alone makes its optimizer's
step. With one rank on each host the bytes that a host sends are compared with what the algorithm
must send.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # where benchmarks and tests are

from bagua_client import Configuration
from benchmarks.support.cells.cell import (
    COMPRESSED,
    COMPUTE,
    DEFAULT_COMPUTE_SECONDS,
    FULL,
    MIB,
    ON_GPUS,
    SLEPT_MODELS,
    STOCK_DEFAULT,
    TUNED,
    Arm,
    Cell,
    Effort,
    grid,
)
from benchmarks.support.cells.run import CellError, Jobs, conditions, job_timeout_seconds
from benchmarks.support.harness import print_table, ratio, spread, write_json
from benchmarks.testbed import Network, Testbed

GRADIENTS = ("gradient_allreduce", "bytegrad", "qadam")
"""Whose buckets count."""
LISTED = ("bytegrad", "powersgd", "decentralized", "low_precision_decentralized", "async")
"""What the live tuning may try."""
BY_LEADERS = ("powersgd", "low_precision_decentralized")
"""Which reduce by node in no other way."""
LOW_RANK = "torch's PowerSGD hook"
SIXTEEN = "bf16 on the wire"
REFERENCES: list[Arm] = [
    {"name": STOCK_DEFAULT, "kind": "stock", "bucket_mib": None},
    {"name": COMPUTE, "kind": "compute"},
    {"name": COMPRESSED, "kind": "compressed"},
    {"name": LOW_RANK, "kind": "powersgd"},
]
DOMINATES = 2.0
"""Communication does where stock DDP's step is so many times as long as computing alone."""
LEAST_GAIN, LEAST_ELSEWHERE, WITHIN, BYTES_WITHIN = 2.5, 0.95, 1.02, 0.05
BESIDE_TORCHS = 1.05
"""How many times as long as torch's hook our powersgd may take."""

SENT: Mapping[str, Callable[[int, float], float]] = {
    STOCK_DEFAULT: lambda ranks, bytes_: 2 * (ranks - 1) / ranks * bytes_,
    "gradient_allreduce": lambda ranks, bytes_: 2 * (ranks - 1) / ranks * bytes_,
    SIXTEEN: lambda ranks, bytes_: (ranks - 1) / ranks * bytes_,
    "bytegrad": lambda ranks, bytes_: 2 * (ranks - 1) / ranks * bytes_ / 4,
    "qadam": lambda ranks, bytes_: 2 * (ranks - 1) / ranks * bytes_ / 4,
    "decentralized": lambda ranks, bytes_: 2 * (ranks - 1) / ranks * bytes_,
    "low_precision_decentralized": lambda ranks, bytes_: 2 * bytes_ / 4,
}
"""Bytes that a rank sends in a step, by the ranks and the bytes of all gradients in float32
(docs/algorithms.md). Of async there are rounds, not steps."""


def groups(cell: Cell, sizes_mib: Sequence[int], channels: Sequence[int]) -> dict[str, list[Arm]]:
    """By algorithm, the settings that are swept."""
    ways = ["off", "shards", "leaders"] if cell.is_hierarchical else ["off"]
    found: dict[str, list[Arm]] = {}
    for algorithm in (*GRADIENTS, SIXTEEN, *LISTED[1:]):
        cuts = sizes_mib if algorithm not in ("decentralized", "async") else sizes_mib[:1]
        precision = "bf16" if algorithm == SIXTEEN else "as_is"
        name = "" if algorithm in ("gradient_allreduce", "qadam", SIXTEEN) else algorithm
        kind = "qadam" if algorithm == "qadam" else "ours"
        for way in ways if algorithm != "async" else ["off"]:
            if way == ("shards" if algorithm in BY_LEADERS else "leaders"):
                continue  # Elsewhere shards are the same with less for one rank to do.
            for size in cuts:
                for count in channels if algorithm != "async" else [1]:
                    configuration = Configuration(
                        size * MIB, way, count, wire_precision=precision, algorithm=name
                    )
                    words = f"{algorithm}: {configuration}"
                    arm = {"name": words, "kind": kind, "configuration": configuration.to_json()}
                    found.setdefault(algorithm, []).append(arm)
    return found


def measured(cell: Cell, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One cell, tuned, swept and run off."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    usual: Effort = ON_GPUS if cell.device == "cuda" else FULL
    swept = groups(cell, options.sizes_mib, options.channels)
    if options.algorithms:
        swept = {name: swept[name] for name in options.algorithms}
    gpus = options.gpus or cell.device == "cuda"
    with Testbed(
        Network.parse(cell.network), cell.nodes, cell.ranks_per_node, gpus=gpus
    ) as testbed:
        if testbed.fallback:
            raise CellError(testbed.fallback)
        found = conditions(testbed)
        jobs = Jobs(cell.name, cell.workload, folder, testbed, job_timeout_seconds(cell))
        tuning = None
        if not options.no_tuning:
            tuning = jobs.tune(usual.most_tuning_steps, ",".join(LISTED))
        arms = [*REFERENCES, *(arm for group in swept.values() for arm in group)]
        turns = [[arm["name"] for arm in group] for group in swept.values()]
        if tuning:
            kept = {"kind": "ours", "configuration": tuning["configuration"]}
            arms.append({"name": TUNED, **kept})
        again = {
            "rounds": options.rounds,
            "steps": usual.run_off_steps,
            "groups": [[arm["name"]] for arm in (*REFERENCES, *(arms[-1:] if tuning else []))]
            + turns,
        }
        times = jobs.measure(arms, 1, usual.sweep_steps, run_off=again)
    return {"cell": cell.to_json(), "conditions": found, "tuning": tuning, **times}


def rows_of(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What took part in the run-off, the fastest first."""
    blocks, sent = result["run_off"]["arms"], result["run_off"]["sent_bytes"]
    cell = result["cell"]
    total, ranks = result["run_off"]["gradient_bytes"], cell["nodes"] * cell["ranks_per_node"]
    found = []
    for name, times in blocks.items():
        algorithm, _, setting = name.partition(": ")
        if name == TUNED:
            setting = str(Configuration.from_json(result["tuning"]["configuration"]))
        own, over = spread(times), ratio(times, blocks[STOCK_DEFAULT])
        formula = SENT.get(algorithm) if cell["ranks_per_node"] == 1 else None
        found.append(
            {
                "algorithm": algorithm,
                "setting": setting,
                "seconds": own.seconds,
                "deviation_seconds": own.deviation_seconds,
                "over_stock": over.paired_ratio,
                "low": over.low,
                "high": over.high,
                "sent_bytes": median(sent[name]),
                "formula_bytes": formula(ranks, total) if formula else None,
            }
        )
    return sorted(found, key=lambda row: row["seconds"])


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each goal that the cell is for: met or missed."""
    by_name = {row["algorithm"]: row for row in rows}
    found: list[tuple[bool, str]] = []
    stock, computing = by_name[STOCK_DEFAULT], by_name[COMPUTE]
    if bytegrad := by_name.get("bytegrad"):
        dominates = stock["seconds"] >= DOMINATES * computing["seconds"]
        least = LEAST_GAIN if dominates else LEAST_ELSEWHERE
        over, where = bytegrad["over_stock"], "dominates" if dominates else "does not dominate"
        what = f"bytegrad at least {least}x stock where communication {where}: {over:.2f}x"
        found.append((over >= least, what))
    if (powersgd := by_name.get("powersgd")) and (torchs := by_name.get(LOW_RANK)):
        over = powersgd["seconds"] / torchs["seconds"]
        what = f"powersgd over torch's hook at most {BESIDE_TORCHS}: {over:.3f}"
        found.append((over <= BESIDE_TORCHS, what))
    if tuned := by_name.get(TUNED):
        rivals = [row for name, row in by_name.items() if name in ("gradient_allreduce", *LISTED)]
        best = min(rivals, key=lambda row: row["seconds"])
        over = tuned["seconds"] / best["seconds"]
        what = f"tuned with all listed within {WITHIN - 1:.0%} of the fastest "
        found.append((over <= WITHIN, f"{what}({best['algorithm']}): {over:.3f}"))
    for row in rows:
        if row["formula_bytes"]:
            off = row["sent_bytes"] / row["formula_bytes"] - 1
            what = f"{row['algorithm']} sends {row['sent_bytes'] / 1e6:.2f} MB a step, "
            what += f"{off:+.1%} of {row['formula_bytes'] / 1e6:.2f}"
            found.append((abs(off) <= BYTES_WITHIN, what))
    return [f"{'met' if is_met else 'MISSED'}: {what}" for is_met, what in found]


def show(result: Mapping[str, Any]) -> None:
    """The cell's table and verdicts."""
    rows = rows_of(result)
    print(f"\n== {result['cell']['name']} ==")
    if tuning := result["tuning"]:
        print(f"the tuning took {tuning['tuning_steps']} steps, {len(tuning['stored']['trials'])} "
              "trials")  # fmt: skip
    header = ["algorithm", "ms a step", "over stock (95 %)", "MB sent by a host", "setting"]
    print_table(
        header,
        [
            [
                row["algorithm"],
                f"{1e3 * row['seconds']:.1f} ± {1e3 * row['deviation_seconds']:.1f}",
                f"{row['over_stock']:.2f}x ({row['low']:.2f} to {row['high']:.2f})",
                f"{row['sent_bytes'] / 1e6:.2f}",
                row["setting"],
            ]
            for row in rows
        ],
    )
    print("\n".join(verdicts(rows)), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["resnet50"], choices=SLEPT_MODELS)
    parser.add_argument("--networks", nargs="+", default=["100mbit", "1gbit", "unshaped"])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--gradient-megabytes", type=float, default=20.0)
    parser.add_argument("--compute-seconds", type=float, default=DEFAULT_COMPUTE_SECONDS)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--gpus", nargs="+", metavar="GPU",
                        help="of each rank; hosts may share one (0 0)")  # fmt: skip
    parser.add_argument("--algorithms", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--sizes-mib", type=int, nargs="+", default=[1, 5, 25])
    parser.add_argument("--channels", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=4, help="rounds of the run-off")
    parser.add_argument("--no-tuning", action="store_true", help="do not run the live tuning")
    parser.add_argument("--output", type=Path, default=Path("build/algorithms"), metavar="FOLDER")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    fields = {
        "nodes": options.nodes,
        "ranks_per_node": options.ranks_per_node,
        "device": options.device,
        "gradient_bytes": round(1e6 * options.gradient_megabytes),
        "compute_seconds": options.compute_seconds,
    }
    failures = 0
    for cell in grid(options.models, options.networks, **fields):
        began = time.monotonic()
        try:
            result = measured(cell, options, (options.output / cell.name).resolve())
        except CellError as error:
            print(f"{cell.name}: FAILED: {error}", file=sys.stderr, flush=True)
            failures += 1
            continue
        result["seconds"] = time.monotonic() - began
        write_json(options.output / f"{cell.name}.json", {"command": sys.argv, **result})
        show(result)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    main()

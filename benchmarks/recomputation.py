"""What tuned recomputation gains on one GPU, or on several over NVLink: a transformer whose blocks
are all recomputed, tuned from its first step, beside the same settings swept by hand.

python benchmarks/recomputation.py --smoke
python benchmarks/recomputation.py --cells llama-8 llama-8-inside gpt2-16 --ranks single
python benchmarks/recomputation.py --cells llama-4 --ranks sharded --gpus 2
python benchmarks/recomputation.py --cells llama-2 --ranks sharded --gpus 2 --micro-batches 8
python benchmarks/recomputation.py --cells llama-24 --ranks single --limit-gib 52
python benchmarks/recomputation.py --cells llama-8 --beside-stock
python benchmarks/recomputation.py --cells small-16 --limits 20
python benchmarks/recomputation.py --cells thin-4 --limits 180 --on-paper
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # where benchmarks and tests are

from benchmarks.support.harness import print_table

JOB = Path(__file__).parent / "support" / "jobs" / "recompute.py"
MODELS = {
    "llama": {"model": "llama", "layers": 16, "hidden": 2048, "tokens": 2048},
    "gpt2": {"model": "gpt2", "layers": 24, "hidden": 1024, "tokens": 1024},
    "small": {"model": "llama", "layers": 12, "hidden": 1024, "tokens": 1024},
    "tiny": {"model": "llama", "layers": 4, "hidden": 64, "tokens": 32, "vocabulary": 128},
    "thin": {"model": "llama", "layers": 6, "hidden": 64, "tokens": 64, "vocabulary": 1024},
}
TIMEOUT_SECONDS = 560.0
PAPER_VARIABLES = {"BAGUA_AUTOTUNE_TRIAL_SECONDS": "0.2", "BAGUA_AUTOTUNE_MAX_SAMPLES": "8"}
PAPER_SECONDS = 600.0
"""For each tuning on paper, in which no time counts."""
SHARE = 0.9


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cells", nargs="+", default=["llama-8"], metavar="MODEL-SEQUENCES[-WAY]",
                        help="a model (llama of 0.85 B parameters, gpt2 medium), sequences a rank, "
                        "and ways: wrapper, transformers; compiled inside, around")  # fmt: skip
    parser.add_argument("--ranks", default="single", choices=["single", "replicated", "sharded"])
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=1, metavar="N", help="of a step")
    parser.add_argument("--limit-gib", type=float, default=0.0, metavar="GIB",
                        help="of the memory that a rank may take; 0: all")  # fmt: skip
    parser.add_argument("--beside-stock", action="store_true",
                        help="another model, which torch alone trains, in the sweep; memory is "
                        "that of both")  # fmt: skip
    parser.add_argument("--limits", type=int, default=0, metavar="TUNINGS",
                        help="instead: tune so often, each time with another limit of the memory, "
                        "every other time with random lengths, and count what ran out")  # fmt: skip
    parser.add_argument("--on-paper", action="store_true",
                        help="with --limits: on the CPU, where a model of torch's allocator has "
                        "the memory, and tensors are 1,024 times as large as they are")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the limits and lengths")
    parser.add_argument("--rounds", type=int, default=3, help="of the sweep")
    parser.add_argument("--output", type=Path, default=Path("build/recomputation"))
    parser.add_argument("--smoke", action="store_true",
                        help="run a small model on the CPU; no figure counts")  # fmt: skip
    options = parser.parse_args()
    if options.smoke:
        options.cells, options.rounds = ["tiny-2"], 1
    return options


def spec_of(cell: str, options: argparse.Namespace) -> dict[str, Any]:
    """What the ranks of one cell read."""
    name, sequences, *ways = cell.split("-")
    compiled = next((way for way in ways if way in ("inside", "around")), "")
    return {
        "vocabulary": 50257 if name == "gpt2" else 32000,
        **MODELS[name],
        "sequences": int(sequences),
        "way": "transformers" if "transformers" in ways else "wrapper",
        "compiled": compiled,
        "ranks": options.ranks,
        "micro_batches": options.micro_batches,
        "device": "cpu" if options.smoke or options.on_paper else "cuda",
        "limit_gib": options.limit_gib,
        "limits": options.limits,
        "beside_stock": options.beside_stock,
        "seed": options.seed,
        "rounds": options.rounds,
        "measured_steps": 2 if options.smoke else 5,
        "most_steps": 3000,
    }


def run_cell(cell: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run the ranks of one cell; what rank 0 has written."""
    folder = options.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{cell}-{options.ranks}-{options.gpus}-{options.micro_batches}"
    spec, out = folder / f"{name}.spec.json", folder / f"{name}.json"
    spec.write_text(json.dumps(spec_of(cell, options)))
    out.unlink(missing_ok=True)
    launcher = [sys.executable]
    if options.ranks != "single":
        ranks = f"--nproc-per-node={options.gpus}"
        launcher += ["-m", "torch.distributed.run", "--standalone", ranks]
    allowed = {"BAGUA_AUTOTUNE_ALLOW": "recomputed_blocks"} if "around" in cell else {}
    variables = {**os.environ, "BAGUA_AUTOTUNE": "1", "OMP_NUM_THREADS": "1", **allowed}
    seconds = TIMEOUT_SECONDS
    if options.on_paper:
        variables, seconds = {**variables, **PAPER_VARIABLES}, PAPER_SECONDS * (options.limits + 1)
    command = [*launcher, str(JOB), str(spec), str(out)]
    subprocess.run(command, env=variables, timeout=seconds, check=True)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def show(cell: str, found: Mapping[str, Any]) -> None:
    """A table of one cell."""
    tuning, sweep = found["tuning"], found["sweep"]
    default = median(next(iter(sweep.values()))["seconds"])
    rows = []
    for name, row in sweep.items():
        if row["seconds"]:
            middle, seconds = median(row["seconds"]), sorted(row["seconds"])
            spread = f"{1e3 * seconds[0]:.1f} to {1e3 * seconds[-1]:.1f}"
            times = f"{default / middle:.3f}x"
            rows.append([name, f"{1e3 * middle:.1f}", spread, times, f"{row['gib']:.1f}"])
        else:
            rows.append([name, "does not fit", "", "", ""])
    print(f"\n{cell}: {tuning['summary']}")
    print(f"{tuning['trials']} trials, {tuning['made_steps']} steps, "
          f"{tuning['made_seconds']:.0f} s until the tuning had ended")  # fmt: skip
    print_table(["blocks recomputed", "ms a step", "of", "default / this", "GiB"], rows)


def show_limits(cell: str, found: Mapping[str, Any]) -> None:
    """A table of tunings with limits, and what must not be."""
    rows = [
        [
            f"{row['limit_gib']:.2f}",
            "yes" if row["varies"] else "no",
            f"{row['recomputed']}",
            f"{100 * row['peak_share']:.0f} %",
            f"{row['steps']}",
            f"{row['retries']}",
            "yes" if row["out_of_memory"] else "no",
            "yes" if row["stock_ran_out"] else "",
        ]
        for row in found["limited"]
    ]
    print_table(
        [
            "limit, GiB",
            "lengths vary",
            "recomputed",
            "peak",
            "steps",
            "retries",
            "ran out",
            "stock too",
        ],
        rows,
    )
    ran_out = sum(bool(row["out_of_memory"]) for row in found["limited"])
    stock = sum(row["stock_ran_out"] for row in found["limited"])
    above = sum(row["peak_share"] > SHARE for row in found["limited"])
    print(f"{cell}: {len(rows)} tunings, out of memory {ran_out}, of these without us too {stock}, "
          f"above {SHARE:.0%} {above}")  # fmt: skip


def main() -> None:
    options = arguments()
    for cell in options.cells:
        try:
            (show_limits if options.limits else show)(cell, run_cell(cell, options))
        except (subprocess.SubprocessError, OSError) as error:
            print(f"{cell}: {error}")


if __name__ == "__main__":
    main()

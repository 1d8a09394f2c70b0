"""The gain over DeepSpeed's default sizes: GPT-2 in ZeRO engines on hosts of this machine, tuned
live, beside the same sizes swept by hand and, with ``--system``, found by short runs.

python benchmarks/zero.py --smoke
python benchmarks/zero.py --models gpt2-medium --networks unshaped 10gbit --gpus 0 0 --system 10
python benchmarks/zero.py --models gpt2-small --gpus 0 0 --equal
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))  # where benchmarks and tests are

from benchmarks.support.cells.run import JOBS, conditions
from benchmarks.support.cells.sharded import (
    MOST_TUNING_STEPS,
    add_choice_of_cells,
    cell_of,
    check_hosts,
    jobs_of,
    run_cells,
    show_in_turns,
    show_tuning,
)
from benchmarks.support.harness import forget_own_variables, print_table
from benchmarks.support.workloads.sharded import (
    ELEMENT_BYTES,
    MODELS,
    SIZES,
    SIZES_OF_STAGE_3,
    config,
)

ROOT = Path(__file__).parents[1]
STOCK, OFF, TUNED, SYSTEM = "DeepSpeed", "tune(), no tuning", "tuned", "by system"
# Elements, as DeepSpeed's file has them; DeepSpeed's own are swept, too.
BUCKETS = (500_000, 2_000_000, 8_000_000, 32_000_000, 128_000_000)
AHEAD = (0, 5_000_000, 200_000_000)
BUCKET, PREFETCH = *SIZES, *SIZES_OF_STAGE_3
KNOBS = {BUCKET: "bucket_bytes", PREFETCH: "prefetch_bytes"}
EQUAL_TIMEOUT_SECONDS = 300.0
# A tuning that is to change much in few steps; where it ends does not matter.
QUICK = {"BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S": "0.5", "BAGUA_AUTOTUNE_WARMUP_TIME_S": "0.5"}
Arm = dict[str, Any]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add_choice_of_cells(parser)
    parser.add_argument("--stage", type=int, choices=[1, 2, 3], default=2, help="of ZeRO")
    parser.add_argument("--system", type=int, default=0, metavar="RUNS",
                        help="also search with bagua-autotune system, with so many runs at most, "
                        "and compare what it finds")  # fmt: skip
    parser.add_argument("--system-steps", type=int, default=8, metavar="N",
                        help="measured in each of these runs")  # fmt: skip
    parser.add_argument("--equal", action="store_true",
                        help="instead: compare losses, weights and the optimizer's state of tuned "
                        "trainings with those of an untouched one, bit for bit")  # fmt: skip
    parser.add_argument("--equal-steps", type=int, default=60, metavar="N",
                        help="of each of these trainings")  # fmt: skip
    parser.add_argument("--output", type=Path, default=Path("build/zero"), metavar="FOLDER")
    parser.add_argument("--smoke", action="store_true",
                        help="run a small model on the CPU; no figure counts")  # fmt: skip
    options = parser.parse_args()
    check_hosts(parser, options)
    if options.smoke:
        options.models, options.networks, options.rounds = ["gpt2-tiny"], ["1gbit"], 1
    return options


def swept(model: str, stage: int) -> dict[str, list[int]]:
    """By name in DeepSpeed's file, the elements that are tried beside DeepSpeed's own. A bucket
    beyond all gradients is what DeepSpeed has by itself; so it is with what is gathered ahead."""
    with torch.device("meta"):
        elements = sum(each.numel() for each in MODELS[model]().parameters())
    sizes = {BUCKET: BUCKETS, **({PREFETCH: AHEAD} if stage == 3 else {})}
    return {name: [size for size in tried if size < elements] for name, tried in sizes.items()}


def _ours(changes: Mapping[str, int], name: str = "") -> Arm:
    """An engine of ours with these sizes, in elements, and DeepSpeed's own else."""
    said = ", ".join(f"{key} {size:,}" for key, size in changes.items())
    sizes = {KNOBS[key]: ELEMENT_BYTES * size for key, size in changes.items()}
    return {"name": name or said, "kind": "sharded, ours", "configuration": sizes}


def _workload(model: str, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "workload": model,
        "sharding": "zero",
        "deepspeed": config(options.stage, options.samples),
        "device": "cuda" if options.gpus else "cpu",
    }


def run_cell(model: str, network: str, options: argparse.Namespace) -> dict[str, Any]:
    """Tune, sweep and compare one model on one network, or compare numbers; what was found."""
    name, workload = f"{model}-stage-{options.stage}-{network}", _workload(model, options)
    found: dict[str, Any] = {"cell": cell_of(model, network, options, workload)}
    if options.system and not options.equal:
        found["system"] = search(name, model, network, options)
    with jobs_of(name, workload, network, options) as jobs:
        if options.equal:
            variables = {**jobs.served(jobs.folder), "BAGUA_AUTOTUNE": "1", **QUICK}
            spec = _numbers(model, options)
            found |= jobs.run("zero_equal", "equal", spec, variables, EQUAL_TIMEOUT_SECONDS)
        else:
            found["tuning"] = jobs.tune(MOST_TUNING_STEPS)
            found |= jobs.measure(**_stage(model, found, options))
        where = {"conditions": conditions(jobs.testbed), "fallback": jobs.testbed.fallback}
        return {**found, **where}


def _numbers(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """What is compared: sizes from the largest to the smallest, and both knobs out of step."""
    sizes = swept(model, options.stage)
    ahead = sizes.get(PREFETCH, [])
    changes = [
        {BUCKET: bucket, **({PREFETCH: ahead[place % len(ahead)]} if ahead else {})}
        for place, bucket in enumerate(sizes[BUCKET])
    ]
    configurations = [{}, *(_ours(each)["configuration"] for each in changes)]
    return {"steps": options.equal_steps, "configurations": configurations}


def _stage(model: str, found: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """What is measured once, and of it what is compared in the end."""
    by_hand = [
        _ours({name: size}) for name, sizes in swept(model, options.stage).items() for size in sizes
    ]
    rest = [{**_ours({}, TUNED), "configuration": found["tuning"]["configuration"]}]
    if "system" in found:
        rest.append(_ours(found["system"]["sizes"], SYSTEM))
    stock = [
        {"name": STOCK, "kind": "sharded", "tune": False},
        {"name": OFF, "kind": "sharded", "tune": True},
    ]
    groups = [[arm["name"]] for arm in (*stock, *rest)]
    return {
        "arms": [*stock, *by_hand, *rest],
        "rounds": 1,
        "steps": 2,
        "run_off": {
            "rounds": options.rounds,
            "steps": 2,
            "groups": [*groups, [arm["name"] for arm in by_hand]],
        },
    }


def search(name: str, model: str, network: str, options: argparse.Namespace) -> dict[str, Any]:
    """What ``bagua-autotune system`` finds on the same hosts: the sizes in elements that differ
    from DeepSpeed's own, and what that took.

    Raises:
        RuntimeError: it failed.
    """
    folder = (options.output / name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    file, spec, output = (
        folder / each for each in ("ds_config.json", "system.spec.json", "system.json")
    )
    workload = _workload(model, options)
    file.write_text(json.dumps(workload.pop("deepspeed"), indent=2))
    spec.write_text(json.dumps({**workload, "steps": 10 * options.system_steps}, indent=2))
    keys = {key: f"{file}:zero_optimization.{key}" for key in (BUCKET, PREFETCH)}
    command = [sys.executable, "-m", "bagua_autotune", "system", "--output", str(output)]
    for key, sizes in swept(model, options.stage).items():
        command += ["--json", f"{keys[key]}={','.join(map(str, sizes))}", "--only", keys[key]]
    command += ["--runs", str(options.system), "--steps", str(options.system_steps), "--"]
    command += _on_hosts(network, options, [str(JOBS / "zero_steps.py"), str(spec), str(file)])
    gpus = {"CUDA_VISIBLE_DEVICES": ",".join(options.gpus)} if options.gpus else {}
    print(f"{name}: {' '.join(command)}", flush=True)
    done = subprocess.run(command, env={**os.environ, **gpus}, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"bagua-autotune system ended with exit code {done.returncode}")
    found: dict[str, Any] = json.loads(output.read_text())
    sizes_of = {where: key for key, where in keys.items()}
    return {
        "sizes": {sizes_of[where]: int(size) for where, size in found["settings"].items()},
        "runs": len(found["runs"]),
        "seconds": sum(run["seconds"] for run in found["runs"]),
        "speedup": found["speedup"],
    }


def _on_hosts(network: str, options: argparse.Namespace, script: Sequence[str]) -> list[str]:
    """The command that runs a script on the same hosts."""
    ranks = len(options.gpus or ()) // options.hosts or 1
    size = ["--nodes", str(options.hosts), "--ranks-per-node", str(ranks)]
    priority = "--gpus" if options.gpus else "--ordinary-priority"
    testbed = [sys.executable, "-m", "benchmarks.testbed", "run", "--network", network]
    return [*testbed, *size, priority, "--", *script]


def show(result: Mapping[str, Any]) -> bool:
    """Print what was found; whether all numbers that were compared are equal."""
    cell = result["cell"]
    stage = cell["deepspeed"]["zero_optimization"]["stage"]
    where = f"{cell['network']}, {cell['hosts']} hosts, {cell['device']}"
    print(f"\n{cell['model']}, ZeRO stage {stage}, {where}")
    if "trainings" in result:
        return _show_numbers(result["trainings"])
    show_in_turns(result["run_off"], STOCK)
    # In elements, as DeepSpeed's file has them.
    configuration = result["tuning"]["configuration"]
    sizes = {key: configuration.get(knob, 0) // ELEMENT_BYTES for key, knob in KNOBS.items()}
    show_tuning(TUNED, {**result["tuning"], "configuration": sizes})
    if "system" in result:
        found = result["system"]
        print(f"{SYSTEM}: {found['sizes']}: {found['runs']} runs, {found['seconds']:.0f} s")
    return True


def _show_numbers(trainings: Mapping[str, Mapping[str, int]]) -> bool:
    header = ["beside an untouched engine", "losses that differ", "tensors that differ", "settings"]
    rows = [
        [
            name,
            f"{found['losses_differ']} of {found['losses']}",
            f"{found['tensors_differ']} of {found['tensors']}",
            str(found["configurations"]),
        ]
        for name, found in trainings.items()
    ]
    print_table(header, rows)
    return not any(each["losses_differ"] or each["tensors_differ"] for each in trainings.values())


def main() -> None:
    options = arguments()
    forget_own_variables()
    suffix = f"-stage-{options.stage}{'-equal' if options.equal else ''}"
    run_cells(options, run_cell, show, suffix)


if __name__ == "__main__":
    main()

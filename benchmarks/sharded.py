"""The gain over ``fully_shard``'s defaults: GPT-2 on hosts of this machine, tuned from its first
step, beside the same settings swept by hand.

python benchmarks/sharded.py --smoke
python benchmarks/sharded.py --models gpt2-medium --networks unshaped 10gbit --gpus 0 0 \
    --allow bfloat16 quantized
python benchmarks/sharded.py --memory-tunings 20 --gpus 0 0
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # where benchmarks and tests are

from benchmarks.support.cells import occupancy
from benchmarks.support.cells.run import conditions, export_job
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
from benchmarks.support.workloads.sharded import MODELS

STOCK, OFF, DEFAULT = "fully_shard", "tune(), no tuning", "ours at its default"
TUNED, ALLOWED = "tuned", "tuned, fewer bits"
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16"}
PROFILED_STEPS = 3
MEMORY_TIMEOUT_SECONDS = 1500.0
MOST_MEMORY_STEPS = 5000
SHARE = 0.9
AS_GOOD = 1.03
"""So many times as long as with the best that fits a step may take with what was found."""
Arm = dict[str, Any]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add_choice_of_cells(parser)
    parser.add_argument("--copies", type=int, default=1,
                        help="of the model (HSDP); as many as hosts: one on each")  # fmt: skip
    parser.add_argument("--micro-batches", type=int, default=1, metavar="N", help="of a step")
    parser.add_argument("--recompute", action="store_true",
                        help="all layers recompute their activations by default")  # fmt: skip
    parser.add_argument("--allow", nargs="+", default=[], metavar="NAME",
                        help="tune again with these allowed: bfloat16, quantized, ...")  # fmt: skip
    parser.add_argument("--only-allowed", action="store_true",
                        help="tune but once, with what --allow lists")  # fmt: skip
    parser.add_argument("--overhead", action="store_true",
                        help="tune and sweep nothing: measure what the default costs")  # fmt: skip
    parser.add_argument("--by-hand", action="store_true", help="tune nothing, only sweep")
    parser.add_argument("--channels", type=int, nargs="+", metavar="N",
                        help="in the sweep (default: 1 2, on GPUs 1 2 4 8)")  # fmt: skip
    parser.add_argument("--profile", action="store_true",
                        help="then profile these on the GPUs, for a few steps each")  # fmt: skip
    parser.add_argument("--memory-tunings", type=int, default=0, metavar="N",
                        help="instead: tune N times, each time with another limit of memory; on "
                        "the CPU with a memory on paper")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of these limits")
    parser.add_argument("--output", type=Path, default=Path("build/sharded"), metavar="FOLDER")
    parser.add_argument("--smoke", action="store_true",
                        help="run a small model on the CPU; no figure counts")  # fmt: skip
    options = parser.parse_args()
    options.channels = options.channels or ([1, 2, 4, 8] if options.gpus else [1, 2])
    check_hosts(parser, options)
    ranks_of_copy, rest = divmod(len(options.gpus or ()) or options.hosts, options.copies)
    if options.copies > 1 and (rest or ranks_of_copy < 2):
        parser.error(f"{options.copies} copies need as many ranks each, at least two")
    if options.profile and (not options.gpus or options.memory_tunings):
        parser.error("--profile needs --gpus and a comparison: it tells what the GPUs do in that")
    if options.only_allowed and (not options.allow or options.by_hand or options.overhead):
        parser.error("--only-allowed is for tunings, and needs --allow")
    if options.smoke:
        options.models, options.networks, options.rounds = ["gpt2-tiny"], ["200mbit"], 1
    return options


def swept(layers: int, options: argparse.Namespace) -> tuple[list[Arm], list[Arm]]:
    """What is swept by hand: settings that leave the numbers as they are, and others."""
    kept, channels, on_gpu = (0, layers // 2, layers), options.channels, bool(options.gpus)
    exact = [_ours({}, DEFAULT)]
    if options.micro_batches > 1:
        exact += _over_micro_batches(layers, options)
    else:
        exact += [
            _ours({"kept_units": keep, "channels": count, "prefetch": ahead})
            for keep, count, ahead in product(kept, channels, (0, 2) if on_gpu else (0,))
            if (keep, count, ahead) != (0, 1, 0)
        ]
        if on_gpu:
            exact.append(_ours({"kept_units": layers, "scatter_group": "own"}))
    has_nodes = len(options.gpus or ()) > options.hosts > 1 == options.copies
    if has_nodes:
        exact += [
            _ours({"kept_units": keep, "channels": count, **across})
            for across in ({"hierarchical": "shards"}, {"node_copy": "on"})
            for keep, count in product((0, layers) if "hierarchical" in across else (0,), channels)
        ]
    ways: list[dict[str, str]] = [{}, {"hierarchical": "shards"}] if has_nodes else [{}]
    narrow = [
        _ours({"kept_units": keep, "channels": count, **way, **_knob_of(name)})
        for name, keep, count, way in product(options.allow, (0, layers), channels, ways)
    ]
    return exact, narrow


def _over_micro_batches(layers: int, options: argparse.Namespace) -> list[Arm]:
    """What travels in which micro-batch: a sweep of all else would take that many times as long."""
    choices: dict[str, Sequence[Any]] = {
        "kept_over_micro_batches": ("off", "on"),
        "deferred_reduction": ("off", "on"),
        "kept_units": (0, layers),
        "channels": options.channels,
    }
    if options.recompute:
        choices["recomputed_blocks"] = (layers, 0)
    swept = [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]
    return [_ours(changes) for changes in swept]


def _knob_of(allowed: str) -> dict[str, str]:
    if allowed in PRECISIONS:
        return {"wire_precision": PRECISIONS[allowed]}
    return {"algorithm": allowed}


def _ours(changes: Mapping[str, Any], name: str = "") -> Arm:
    said = [f"{key} {value}" for key, value in changes.items() if value not in (0, 1)]
    return {"name": name or ", ".join(said), "kind": "sharded, ours", "configuration": changes}


def run_cell(model: str, network: str, options: argparse.Namespace) -> dict[str, Any]:
    """Tune, sweep and compare one model on one network; what was measured."""
    workload = _workload(model, options)
    with jobs_of(f"{model}-{network}", workload, network, options) as jobs:
        tunings = {}
        if not (options.overhead or options.by_hand or options.only_allowed):
            tunings[TUNED] = jobs.tune(MOST_TUNING_STEPS)
        if options.allow and not options.by_hand:
            tunings[ALLOWED] = jobs.tune(MOST_TUNING_STEPS, ",".join(options.allow))
        stage = _stage(model, tunings, options)
        return {
            "cell": cell_of(model, network, options, workload),
            "conditions": conditions(jobs.testbed),
            "fallback": jobs.testbed.fallback,
            "tunings": tunings,
            **jobs.measure(**stage),
        }


def _workload(model: str, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "workload": model,
        "sharding": "fully_shard",
        "samples": options.samples,
        "copies": options.copies,
        "micro_batches": options.micro_batches,
        "recomputes": options.recompute,
        "device": "cuda" if options.gpus else "cpu",
    }


def _stage(
    model: str, tunings: Mapping[str, Mapping[str, Any]], options: argparse.Namespace
) -> dict[str, Any]:
    """What is measured once, and of it what is compared in the end."""
    arms: list[Arm] = [
        {"name": STOCK, "kind": "sharded", "tune": False},
        {"name": OFF, "kind": "sharded", "tune": True},
    ]
    groups = [[STOCK], [OFF], [DEFAULT]]
    if options.overhead:
        arms.append(_ours({}, DEFAULT))
    else:
        exact, narrow = swept(MODELS[model].LAYERS, options)
        tuned = [_ours(found["configuration"], arm) for arm, found in tunings.items()]
        arms += [*exact, *narrow, *tuned]
        groups += [
            [arm["name"] for arm in each] for each in (*([arm] for arm in tuned), exact, narrow)
        ]
    again: dict[str, Any] = {
        "rounds": options.rounds,
        "steps": 2,
        "groups": [each for each in groups if each],
    }
    if options.profile:
        again["profiled_steps"] = PROFILED_STEPS
    return {"arms": arms, "rounds": 1, "steps": 2, "run_off": again}


def run_in_memory(model: str, network: str, options: argparse.Namespace) -> dict[str, Any]:
    """Tune one model again and again with its memory limited; what was found.

    Raises:
        RuntimeError: the job failed, as it does when it runs out of memory.
    """
    workload = _workload(model, options)
    asked = {
        "tunings": options.memory_tunings,
        "seed": options.seed,
        "most_steps": MOST_MEMORY_STEPS,
    }
    with jobs_of(f"{model}-{network}-memory", workload, network, options) as jobs:
        variables = jobs.served(jobs.folder)
        found = jobs.run("tune_in_memory", "tune", asked, variables, MEMORY_TIMEOUT_SECONDS)
        tunings = judged(found)
        for each in tunings:
            stored = export_job(jobs.folder / "autotune.db", each["job"], jobs.folder)
            states = [trial["state"] for trial in stored["trials"]]
            each["trials"] = {state: states.count(state) for state in sorted(set(states))}
        return {
            "cell": cell_of(model, network, options, workload),
            "conditions": conditions(jobs.testbed),
            "swept": found["swept"],
            "tunings": tunings,
        }


def judged(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each tuning with the best of the sweep that fits, and how much slower its own is."""
    return [{**tuning, **_judge(tuning, found["swept"])} for tuning in found["tunings"]]


def _judge(tuning: Mapping[str, Any], swept: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    limit_bytes = SHARE * tuning["allowed_bytes"]
    fitting = [each for each in swept if each["peak_bytes"] <= limit_bytes] or swept[:1]
    best = min(fitting, key=lambda each: each["seconds"])
    own = next((e for e in swept if e["configuration"] == tuning["configuration"]), None)
    ratio = own["seconds"] / best["seconds"] if own is not None else None
    is_over = own is not None and own is not swept[0] and own["peak_bytes"] > limit_bytes
    return {
        "best": best["configuration"],
        "ratio": ratio,
        "is_found": ratio is not None and ratio <= AS_GOOD and not is_over,
        "is_over": is_over,
    }


def show_settings(found: Mapping[str, Any], tunings: Sequence[Mapping[str, Any]]) -> None:
    """Print what was swept, what each tuning found, and whether there was ever too little
    memory."""
    print_table(
        ["by hand", "ms per step", "peak MiB"],
        [
            [
                _said(e["configuration"]),
                f"{1e3 * e['seconds']:.0f}",
                f"{e['peak_bytes'] / 2**20:.0f}",
            ]
            for e in found["swept"]
        ],
    )
    print_table(
        ["limit MiB", "found", "best that fits", "times as long", "steps", "seconds"],
        [
            [
                f"{SHARE * each['allowed_bytes'] / 2**20:.0f}",
                _said(each["configuration"]),
                _said(each["best"]),
                "-" if each["ratio"] is None else f"{each['ratio']:.2f}",
                str(each["steps"]),
                f"{each['seconds']:.0f}",
            ]
            for each in tunings
        ],
    )


def _said(configuration: Mapping[str, Any]) -> str:
    return f"kept {configuration['kept_units']}, channels {configuration['channels']}"


def show_memory(result: Mapping[str, Any]) -> bool:
    """Print what became of the tunings; whether there was memory enough for all of them, and the
    best that fits was found in each."""
    tunings = result["tunings"]
    show_settings(result, tunings)
    overflows = sum(each["overflows"] for each in tunings)
    over, found = (sum(each[what] for each in tunings) for what in ("is_over", "is_found"))
    refused = sum(each["trials"].get("infeasible", 0) for each in tunings)
    print(
        f"{len(tunings)} tunings: out of memory {overflows} times, above the limit {over} times; "
        f"the best that fits found in {found}; {refused} trials infeasible"
    )
    return not overflows and not over and found == len(tunings)


def show(result: Mapping[str, Any]) -> bool:
    """Print what was compared in the end, and what the tunings took."""
    cell, measured = result["cell"], result["run_off"]
    print(f"\n{cell['model']}, {cell['network']}, {cell['hosts']} hosts, {cell['device']}")
    show_in_turns(measured, STOCK)
    if "profile" in result:
        occupancy.show(result["profile"])
    for name, tuning in result["tunings"].items():
        show_tuning(name, tuning)
    return True


def main() -> None:
    options = arguments()
    forget_own_variables()
    if options.memory_tunings:
        run_cells(options, run_in_memory, show_memory, "-memory")
    else:
        run_cells(options, run_cell, show)


if __name__ == "__main__":
    main()

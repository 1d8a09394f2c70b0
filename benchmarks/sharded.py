"""The gain over ``fully_shard``'s defaults: GPT-2 on hosts of this machine, tuned from its first
step, beside the same settings swept by hand.

python benchmarks/sharded.py --smoke
python benchmarks/sharded.py --models gpt2-medium --networks unshaped 10gbit --gpus 0 0 \
    --allow bfloat16 quantized
python benchmarks/sharded.py --memory-tunings 20 --gpus 0 0
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # where benchmarks and tests are

from benchmarks.support.cells import memory, occupancy
from benchmarks.support.cells.conditions import conditions
from benchmarks.support.cells.spread import ratio, spread
from benchmarks.support.cells.stored import export_job, tail
from benchmarks.support.harness import Comparison, print_table, write_json
from benchmarks.support.workloads.sharded import MODELS, SAMPLES
from benchmarks.testbed import Network, Testbed

JOBS = Path(__file__).parent / "support" / "jobs"
STOCK, OFF, DEFAULT = "fully_shard", "tune(), no tuning", "ours at its default"
TUNED, ALLOWED = "tuned", "tuned, fewer bits"
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16"}
MOST_TUNING_STEPS = 300
PROFILED_STEPS = 3
JOB_TIMEOUT_SECONDS = 400.0
MEMORY_TIMEOUT_SECONDS = 1500.0
MOST_MEMORY_STEPS = 5000
Arm = dict[str, Any]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["gpt2-small"])
    parser.add_argument("--networks", nargs="+", metavar="NETWORK", default=["unshaped"])
    parser.add_argument("--gpus", nargs="+", metavar="GPU",
                        help="of each rank; hosts may share one (0 0); none: the CPU")  # fmt: skip
    parser.add_argument("--hosts", type=int,
                        help="default: one for each GPU, 2 on the CPU; 1: over NVLink")  # fmt: skip
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of each rank in a step")
    parser.add_argument("--copies", type=int, default=1,
                        help="of the model (HSDP); as many as hosts: one on each")  # fmt: skip
    parser.add_argument("--allow", nargs="+", default=[], metavar="NAME",
                        help="tune again with these allowed: bfloat16, quantized, ...")  # fmt: skip
    parser.add_argument("--overhead", action="store_true",
                        help="tune and sweep nothing: measure what the default costs")  # fmt: skip
    parser.add_argument("--by-hand", action="store_true", help="tune nothing, only sweep")
    parser.add_argument("--channels", type=int, nargs="+", metavar="N",
                        help="in the sweep (default: 1 2, on GPUs 1 2 4 8)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=4,
                        help="blocks of two steps of what is compared in the end")  # fmt: skip
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
    options.hosts = options.hosts or (len(options.gpus) if options.gpus else 2)
    if options.gpus and len(options.gpus) % options.hosts:
        parser.error(f"{len(options.gpus)} GPUs cannot be shared out to {options.hosts} hosts")
    if options.copies > 1 and (len(options.gpus or ()) or options.hosts) % options.copies:
        parser.error(f"the ranks cannot be shared out to {options.copies} copies")
    if options.profile and (not options.gpus or options.memory_tunings):
        parser.error("--profile needs --gpus and a comparison: it tells what the GPUs do in that")
    if options.smoke:
        options.models, options.networks, options.rounds = ["gpt2-tiny"], ["200mbit"], 1
    return options


def swept(layers: int, options: argparse.Namespace) -> tuple[list[Arm], list[Arm]]:
    """What is swept by hand: settings that leave the numbers as they are, and others."""
    kept, channels, on_gpu = (0, layers // 2, layers), options.channels, bool(options.gpus)
    exact = [_ours({}, DEFAULT)]
    exact += [
        _ours({"kept_units": keep, "channels": count, "prefetch": ahead})
        for keep, count, ahead in product(kept, channels, (0, 2) if on_gpu else (0,))
        if (keep, count, ahead) != (0, 1, 0)
    ]
    if on_gpu:
        exact.append(_ours({"kept_units": layers, "scatter_group": "own"}))
    if _ranks_of_host(options) > 1 and options.hosts > 1 and options.copies == 1:
        exact += [
            _ours({"kept_units": keep, "channels": count, **across})
            for across in ({"hierarchical": "shards"}, {"node_copy": "on"})
            for keep, count in product((0, layers) if "hierarchical" in across else (0,), channels)
        ]
    narrow = [
        _ours({"kept_units": keep, "channels": count, **_knob_of(name)})
        for name, keep, count in product(options.allow, (0, layers), channels)
    ]
    return exact, narrow


def _knob_of(allowed: str) -> dict[str, str]:
    if allowed in PRECISIONS:
        return {"wire_precision": PRECISIONS[allowed]}
    return {"algorithm": allowed}


def _ours(changes: Mapping[str, Any], name: str = "") -> Arm:
    said = [f"{key} {value}" for key, value in changes.items() if value not in (0, 1)]
    return {"name": name or ", ".join(said), "kind": "sharded, ours", "configuration": changes}


def run_cell(model: str, network: str, options: argparse.Namespace) -> dict[str, Any]:
    """Tune, sweep and compare one model on one network; what was measured."""
    name = f"{model}-{network}"
    folder = (options.output / name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    workload = _workload(model, options)
    with _testbed(network, options) as testbed:
        if testbed.fallback:
            print(f"{name}: over loopback: {testbed.fallback}", flush=True)
        jobs = _Jobs(name, workload, folder, testbed)
        tunings = {} if options.overhead or options.by_hand else {TUNED: jobs.tune()}
        if options.allow and not options.by_hand:
            tunings[ALLOWED] = jobs.tune(",".join(options.allow))
        stage = _stage(model, tunings, options)
        return {
            "cell": {"model": model, "network": network, "hosts": options.hosts, **workload},
            "conditions": conditions(testbed),
            "fallback": testbed.fallback,
            "tunings": tunings,
            **jobs.run("measure", "measure", stage),
        }


def _testbed(network: str, options: argparse.Namespace) -> Testbed:
    ranks = _ranks_of_host(options)
    return Testbed(Network.parse(network), options.hosts, ranks, gpus=options.gpus or False)


def _ranks_of_host(options: argparse.Namespace) -> int:
    return len(options.gpus or ()) // options.hosts or 1


def _workload(model: str, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "workload": model,
        "sharding": "fully_shard",
        "samples": options.samples,
        "copies": options.copies,
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
        groups += [[arm["name"] for arm in each] for each in (tuned[:1], tuned[1:], exact, narrow)]
    again: dict[str, Any] = {
        "rounds": options.rounds,
        "steps": 2,
        "groups": [each for each in groups if each],
    }
    if options.profile:
        again["profiled_steps"] = PROFILED_STEPS
    return {"arms": arms, "rounds": 1, "steps": 2, "warmup_steps": 1, "run_off": again}


def run_in_memory(model: str, network: str, options: argparse.Namespace) -> dict[str, Any]:
    """Tune one model again and again with its memory limited; what was found.

    Raises:
        RuntimeError: the job failed, as it does when it runs out of memory.
    """
    name = f"{model}-{network}-memory"
    folder = (options.output / name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    workload = _workload(model, options)
    with _testbed(network, options) as testbed:
        token, database = secrets.token_urlsafe(16), folder / "autotune.db"
        database.unlink(missing_ok=True)
        variables = {
            "BAGUA_AUTOTUNE_URL": testbed.serve(database, token, folder / "service.log"),
            "BAGUA_AUTOTUNE_TOKEN": token,
        }
        asked = {
            "tunings": options.memory_tunings,
            "seed": options.seed,
            "most_steps": MOST_MEMORY_STEPS,
        }
        jobs = _Jobs(name, workload, folder, testbed)
        found = jobs.run("tune_in_memory", "tune", asked, variables, MEMORY_TIMEOUT_SECONDS)
        tunings = memory.judged(found)
        for each in tunings:
            stored = export_job(database, each["job"], folder)
            states = [trial["state"] for trial in stored["trials"]]
            each["trials"] = {state: states.count(state) for state in sorted(set(states))}
        return {
            "cell": {"model": model, "network": network, "hosts": options.hosts, **workload},
            "conditions": conditions(testbed),
            "swept": found["swept"],
            "tunings": tunings,
        }


def show_memory(result: Mapping[str, Any]) -> bool:
    """Print what became of the tunings; whether there was memory enough for all of them, and the
    best that fits was found in each."""
    tunings = result["tunings"]
    memory.show(result, tunings)
    overflows = sum(each["overflows"] for each in tunings)
    over, found = (sum(each[what] for each in tunings) for what in ("is_over", "is_found"))
    refused = sum(each["trials"].get("infeasible", 0) for each in tunings)
    print(
        f"{len(tunings)} tunings: out of memory {overflows} times, above the limit {over} times; "
        f"the best that fits found in {found}; {refused} trials infeasible"
    )
    return not overflows and not over and found == len(tunings)


class _Jobs:
    """The jobs of one cell, all on its testbed."""

    def __init__(
        self, name: str, workload: Mapping[str, Any], folder: Path, testbed: Testbed
    ) -> None:
        self._name, self._workload = name, workload
        self._folder, self._testbed = folder, testbed

    def tune(self, allow: str = "") -> dict[str, Any]:
        """A live tuning, by a service of its own; with what that stored."""
        token, folder = secrets.token_urlsafe(16), self._folder / (allow or "exact")
        folder.mkdir(exist_ok=True)
        database = folder / "autotune.db"
        database.unlink(missing_ok=True)
        variables = {
            "BAGUA_AUTOTUNE": "1",
            "BAGUA_AUTOTUNE_URL": self._testbed.serve(database, token, folder / "service.log"),
            "BAGUA_AUTOTUNE_TOKEN": token,
            "BAGUA_AUTOTUNE_JOB": self._name,
            "BAGUA_AUTOTUNE_ALLOW": allow,
        }
        limits = {
            "most_steps": MOST_TUNING_STEPS,
            "after_steps": 5,
            "tells_loss": bool(allow),
        }
        found = self.run("tune", f"tune-{allow or 'exact'}", limits, variables)
        return {**found, "stored": export_job(database, self._name, folder)}

    def run(
        self,
        program: str,
        name: str,
        specification: Mapping[str, Any],
        variables: Mapping[str, str] | None = None,
        timeout_seconds: float = JOB_TIMEOUT_SECONDS,
    ) -> dict[str, Any]:
        """One torchrun job over all hosts, and what its rank 0 wrote."""
        began = time.monotonic()
        reads, writes, log = (
            self._folder / f"{name}{end}" for end in (".spec.json", ".json", ".log")
        )
        writes.unlink(missing_ok=True)
        log.unlink(missing_ok=True)
        reads.write_text(json.dumps({**self._workload, **specification}, indent=2))
        script = [str(JOBS / f"{program}.py"), str(reads), str(writes)]
        code = self._testbed.start(script, variables, log).wait(timeout_seconds)
        if code or not writes.exists():
            if log.exists() and memory.OUT_OF_MEMORY in log.read_text(errors="replace"):
                print(f"{self._name}: {name} ran out of memory", file=sys.stderr, flush=True)
            raise RuntimeError(f"{name} ended with exit code {code}; {log} ends:\n{tail(log)}")
        print(f"{self._name}: {name}, {time.monotonic() - began:.0f} s", flush=True)
        found: dict[str, Any] = json.loads(writes.read_text())
        return found


def show(result: Mapping[str, Any]) -> None:
    """Print what was compared in the end, and what the tunings took."""
    cell, measured = result["cell"], result["run_off"]
    print(f"\n{cell['model']}, {cell['network']}, {cell['hosts']} hosts, {cell['device']}")
    rows = []
    for name, times in measured["arms"].items():
        found = spread(times)
        rows.append(
            [
                name,
                f"{1e3 * found.seconds:.0f} ± {1e3 * found.deviation_seconds:.0f}",
                _said(ratio(times, measured["arms"][STOCK])),
                f"{measured['peak_bytes'][name] / 2**20:.0f}",
            ]
        )
    print_table(["setting", "ms per step", "times as fast as fully_shard", "peak MiB"], rows)
    if "profile" in result:
        occupancy.show(result["profile"])
    for name, tuning in result["tunings"].items():
        ended = "" if tuning["ended"] else "not ended after "
        took = f"{ended}{tuning['tuning_steps']} steps, {tuning['tuning_seconds']:.0f} s"
        trials = len(tuning["stored"]["trials"])
        print(f"{name}: {tuning['configuration']}: {trials} trials, {took}")


def _said(found: Comparison) -> str:
    return f"{found.paired_ratio:.2f} ({found.low:.2f} to {found.high:.2f})"


def main() -> None:
    options = arguments()
    for name in [name for name in os.environ if name.startswith("BAGUA_")]:
        del os.environ[name]
    failures = _run_all(options)
    if failures:
        sys.exit(f"failed: {', '.join(failures)}")


def _run_all(options: argparse.Namespace) -> Sequence[str]:
    failures = []
    for model, network in product(options.models, options.networks):
        try:
            if options.memory_tunings:
                result = run_in_memory(model, network, options)
                write_json(options.output / f"{model}-{network}-memory.json", result)
                if not show_memory(result):
                    failures.append(f"{model} {network}")
                continue
            result = run_cell(model, network, options)
        except (RuntimeError, TimeoutError) as error:  # The other cells cost time, too.
            print(f"{model}, {network}: {error}", file=sys.stderr, flush=True)
            failures.append(f"{model} {network}")
        else:
            write_json(options.output / f"{model}-{network}.json", result)
            show(result)
    return failures


if __name__ == "__main__":
    main()

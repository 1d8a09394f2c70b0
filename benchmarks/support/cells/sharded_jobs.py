"""The jobs of a cell whose model ``fully_shard`` or ZeRO shards, and what is printed of them."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.support.cells.kept import tail, with_stored
from benchmarks.support.harness import Comparison, print_table, ratio, spread, write_json
from benchmarks.support.workloads.sharded import MODELS, SAMPLES
from benchmarks.testbed import Network, Testbed

JOBS = Path(__file__).parents[1] / "jobs"
OUT_OF_MEMORY = "OutOfMemoryError"
MOST_TUNING_STEPS = 300
JOB_TIMEOUT_SECONDS = 400.0


def add_choice_of_cells(parser: argparse.ArgumentParser) -> None:
    """The options that say which cells are measured."""
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["gpt2-small"])
    parser.add_argument("--networks", nargs="+", metavar="NETWORK", default=["unshaped"])
    parser.add_argument("--gpus", nargs="+", metavar="GPU",
                        help="of each rank; hosts may share one (0 0); none: the CPU")  # fmt: skip
    parser.add_argument("--hosts", type=int,
                        help="default: one for each GPU, 2 on the CPU; 1: over NVLink")  # fmt: skip
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of each rank in a step")
    parser.add_argument("--rounds", type=int, default=4,
                        help="blocks of two steps of what is compared in the end")  # fmt: skip


def check_hosts(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Fill in how many hosts there are."""
    options.hosts = options.hosts or (len(options.gpus) if options.gpus else 2)
    if options.gpus and len(options.gpus) % options.hosts:
        parser.error(f"{len(options.gpus)} GPUs cannot be shared out to {options.hosts} hosts")


def testbed_of(network: str, options: argparse.Namespace) -> Testbed:
    """The hosts of a cell, not yet made."""
    ranks = len(options.gpus or ()) // options.hosts or 1
    return Testbed(Network.parse(network), options.hosts, ranks, gpus=options.gpus or False)


class Jobs:
    """The jobs of one cell, all on its testbed; what they write is in ``folder``."""

    def __init__(
        self, name: str, workload: Mapping[str, Any], folder: Path, testbed: Testbed
    ) -> None:
        self._name, self._workload = name, workload
        self._folder, self._testbed = folder, testbed
        if testbed.fallback:
            print(f"{name}: over loopback: {testbed.fallback}", flush=True)

    def served(self, folder: Path) -> dict[str, str]:
        """The variables by which a job finds a service of its own, whose database, a new one, is
        in ``folder``."""
        token, database = secrets.token_urlsafe(16), folder / "autotune.db"
        folder.mkdir(exist_ok=True)
        database.unlink(missing_ok=True)
        return {
            "BAGUA_AUTOTUNE_URL": self._testbed.serve(database, token, folder / "service.log"),
            "BAGUA_AUTOTUNE_TOKEN": token,
            "BAGUA_AUTOTUNE_JOB": self._name,
        }

    def tune(self, allow: str = "") -> dict[str, Any]:
        """A live tuning, by a service of its own; with what that stored."""
        folder = self._folder / (allow or "exact")
        variables = {
            **self.served(folder),
            "BAGUA_AUTOTUNE": "1",
            "BAGUA_AUTOTUNE_ALLOW": allow,
        }
        limits = {
            "most_steps": MOST_TUNING_STEPS,
            "after_steps": 5,
            "tells_loss": bool(allow),
        }
        found = self.run("tune", f"tune-{allow or 'exact'}", limits, variables)
        return with_stored(found, folder / "autotune.db", self._name, folder)

    def run(
        self,
        program: str,
        name: str,
        specification: Mapping[str, Any],
        variables: Mapping[str, str] | None = None,
        timeout_seconds: float = JOB_TIMEOUT_SECONDS,
    ) -> dict[str, Any]:
        """One torchrun job over all hosts, and what its rank 0 wrote.

        Raises:
            RuntimeError: it failed.
            TimeoutError: it took longer.
        """
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
            if log.exists() and OUT_OF_MEMORY in log.read_text(errors="replace"):
                print(f"{self._name}: {name} ran out of memory", file=sys.stderr, flush=True)
            raise RuntimeError(f"{name} ended with exit code {code}; {log} ends:\n{tail(log)}")
        print(f"{self._name}: {name}, {time.monotonic() - began:.0f} s", flush=True)
        found: dict[str, Any] = json.loads(writes.read_text())
        return found


def show_in_turns(measured: Mapping[str, Any], stock: str) -> None:
    """Print what was compared in turns, each beside the arm ``stock``."""
    rows = []
    for name, times in measured["arms"].items():
        found = spread(times)
        rows.append(
            [
                name,
                f"{1e3 * found.seconds:.0f} ± {1e3 * found.deviation_seconds:.0f}",
                _said(ratio(times, measured["arms"][stock])),
                f"{measured['peak_bytes'][name] / 2**20:.0f}",
            ]
        )
    print_table(["setting", "ms per step", f"times as fast as {stock}", "peak MiB"], rows)


def show_tuning(name: str, tuning: Mapping[str, Any]) -> None:
    """Print where a live tuning ended, or what was best until then, and what it took."""
    ended = "" if tuning["ended"] else "not ended after "
    took = f"{ended}{tuning['tuning_steps']} steps, {tuning['tuning_seconds']:.0f} s"
    trials = len(tuning["stored"]["trials"])
    print(f"{name}: {tuning['configuration']}: {trials} trials, {took}")


def _said(found: Comparison) -> str:
    return f"{found.paired_ratio:.2f} ({found.low:.2f} to {found.high:.2f})"


def run_cells(
    options: argparse.Namespace,
    run: Callable[[str, str, argparse.Namespace], dict[str, Any]],
    show: Callable[[Mapping[str, Any]], bool],
    suffix: str = "",
) -> None:
    """Run and show each model on each network; the results are written to the output folder.

    Args:
        show: whether a result is as it should be.
        suffix: of the results' names.

    Raises:
        SystemExit: a job failed, or a result is not as it should be.
    """
    failures = []
    for model, network in product(options.models, options.networks):
        try:
            result = run(model, network, options)
        except (RuntimeError, TimeoutError) as error:  # The other cells cost time, too.
            print(f"{model}, {network}: {error}", file=sys.stderr, flush=True)
            failures.append(f"{model} {network}")
            continue
        write_json(options.output / f"{model}-{network}{suffix}.json", result)
        if not show(result):
            failures.append(f"{model} {network}")
    if failures:
        sys.exit(f"failed: {', '.join(failures)}")

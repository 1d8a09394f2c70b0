"""What sharded.py and zero.py share: which cells are measured, and what is printed of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from typing import Any

from benchmarks.support.cells.run import Jobs
from benchmarks.support.harness import Comparison, print_table, ratio, spread, write_json
from benchmarks.support.workloads.sharded import MODELS, SAMPLES
from benchmarks.testbed import Network, Testbed

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


@contextmanager
def jobs_of(
    name: str, workload: Mapping[str, Any], network: str, options: argparse.Namespace
) -> Iterator[Jobs]:
    """The jobs of a cell, on its hosts and in its folder."""
    folder = (options.output / name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    link, ranks = Network.parse(network), len(options.gpus or ()) // options.hosts or 1
    with Testbed(link, options.hosts, ranks, gpus=options.gpus or False) as testbed:
        yield Jobs(name, workload, folder, testbed, JOB_TIMEOUT_SECONDS)


def cell_of(
    model: str, network: str, options: argparse.Namespace, workload: Mapping[str, Any]
) -> dict[str, Any]:
    """What a result says of its cell."""
    return {"model": model, "network": network, "hosts": options.hosts, **workload}


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
        except RuntimeError as error:  # The other cells cost time, too.
            print(f"{model}, {network}: {error}", file=sys.stderr, flush=True)
            failures.append(f"{model} {network}")
            continue
        write_json(options.output / f"{model}-{network}{suffix}.json", result)
        if not show(result):
            failures.append(f"{model} {network}")
    if failures:
        sys.exit(f"failed: {', '.join(failures)}")

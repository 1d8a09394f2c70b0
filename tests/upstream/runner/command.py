"""The command line: which tests run in which modes, and what the exit code says."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from tests.upstream.runner.report import FAILED, PASSED, Record, Report, Result, unknown_names
from tests.upstream.runner.running import run_tests
from tests.upstream.runner.subject import STOCK, Subject


def main(subject: Subject, native: Subject, arguments: Sequence[str] | None = None) -> int:
    """0 if all is as it should be, else 1; 2 for a command line that says nothing to run.

    Args:
        native: the same where each rank has a GPU.
    """
    began = time.monotonic()
    options = _parser(subject).parse_args(arguments)
    subject = native if options.native else subject
    options.world_sizes = options.world_sizes or subject.world_sizes
    names = {world_size: subject.names(world_size) for world_size in options.world_sizes}
    chosen = {
        world_size: [name for name in of_size if options.only is None or options.only in name]
        for world_size, of_size in names.items()
    }
    if options.list:
        print("\n".join(dict.fromkeys(name for of_size in chosen.values() for name in of_size)))
        return 0
    if not any(chosen.values()):
        print(f"no test has {options.only} in its name", file=sys.stderr)
        return 2
    if options.native and (lacking := _lacking(max(options.world_sizes))):
        print(lacking, file=sys.stderr)
        return 2
    record = Record(options.json)
    # Ranks mostly wait for one another: those of one world size leave room for the others'.
    with ThreadPoolExecutor() as threads:
        missing = threads.map(
            lambda size: _run_modes(subject, chosen[size], size, options, began, record),
            options.world_sizes,
        )
        left = sum(missing)
    report = Report(record.results, subject, is_full=chosen == names and not left)
    report.print()
    if left:
        print(f"\nINCOMPLETE: {left} tests were not begun within {options.seconds:g} s")
    found = [*unknown_names(subject), *report.problems()]
    if found:
        print("\n" + "\n".join(f"PROBLEM: {line}" for line in found))
    return int(bool(found))


def _parser(subject: Subject) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=f"PyTorch's own tests of {subject.title} in several modes, on gloo and the CPU."
    )
    parser.add_argument(
        "--native",
        action="store_true",
        help="those that ask for GPUs, on NCCL and a GPU for each rank",
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=subject.modes,
        default=list(subject.modes),
        help="stock always runs: what passes in it is what the others have to pass",
    )
    parser.add_argument(
        "--world-sizes", nargs="+", type=int, metavar="RANKS", help="run beside one another"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="after which no test is begun; the modes share them",
    )
    parser.add_argument("--only", metavar="NAME", help="tests with this in their name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every result there")
    parser.add_argument("--list", action="store_true", help="print the tests and run none")
    parser.add_argument(
        "--show-output", action="store_true", help="let through what the tests print"
    )
    return parser


def _lacking(ranks: int) -> str:
    """What the machine has not; empty: it has all."""
    gpus = torch.cuda.device_count()
    if gpus < ranks:
        return f"--native gives each rank a GPU: {ranks} ranks, and this machine has {gpus}"
    return "" if dist.is_nccl_available() else "--native needs a PyTorch with NCCL"


def _run_modes(
    subject: Subject,
    names: Sequence[str],
    world_size: int,
    options: argparse.Namespace,
    began: float,
    record: Record,
) -> int:
    """In mode stock all tests, in the others those that passed in it; how many were not begun."""
    modes = [STOCK, *(mode for mode in subject.least_shares if mode in options.modes)]
    missing = 0
    for turn, mode in enumerate(modes, 1):
        until = began + options.seconds * turn / len(modes)
        results = _run_mode(subject, names, mode, world_size, options.show_output, until, record)
        missing += len(names) - len(results)
        if mode == STOCK:
            names = [result.test for result in results if result.outcome == PASSED]
    return missing


def _run_mode(
    subject: Subject,
    names: Sequence[str],
    mode: str,
    world_size: int,
    shows_output: bool,
    until: float,
    record: Record,
) -> list[Result]:
    where = f"{mode}, {world_size} ranks"
    started = time.monotonic()
    results = []
    for result in run_tests(subject, names, mode, world_size, shows_output, until):
        results.append(result)
        record.add(result)
        if sys.stderr.isatty():
            print(f"\r{where}: {len(results)} of {len(names)}", end=" ", file=sys.stderr)
            sys.stderr.flush()
        elif result.outcome == FAILED:
            print(f"{where}: {result.test}: {result.reason}", file=sys.stderr, flush=True)
    seconds = f"{time.monotonic() - started:.0f} s with the start of ranks"
    print(f"\r{where}: {len(results)} tests in {seconds}", file=sys.stderr, flush=True)
    return results

"""The command line: which tests run in which modes, and what the exit code says."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.upstream.classes import MODES, STOCK
from tests.upstream.exceptions import KNOWN
from tests.upstream.report import Report, unknown_names
from tests.upstream.results import PASSED, Result, write_json
from tests.upstream.running import run_tests
from tests.upstream.selection import names_of_tests


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all is as it should be, else 1; 2 for a command line that says nothing to run."""
    options = _parser().parse_args(arguments)
    names = names_of_tests()
    chosen = [name for name in names if options.only is None or options.only in name]
    if options.list:
        print("\n".join(chosen))
        return 0
    if not chosen:
        print(f"no test has {options.only} in its name", file=sys.stderr)
        return 2
    # Ranks mostly wait for one another: those of one world size leave room for the others'.
    with ThreadPoolExecutor() as threads:
        runs = threads.map(
            lambda world_size: _run_modes(chosen, options.modes, world_size, options.show_output),
            options.world_sizes,
        )
        results = [result for run in runs for result in run]
    report = Report(results, KNOWN, is_full=chosen == names)
    report.print()
    if options.json is not None:
        write_json(options.json, results)
    found = [*unknown_names(KNOWN, names), *report.problems()]
    if found:
        print("\n" + "\n".join(f"PROBLEM: {line}" for line in found))
    return int(bool(found))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="PyTorch's own tests of DistributedDataParallel, with the class that is "
        "named by the mode, on gloo and the CPU."
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=MODES,
        default=list(MODES),
        help="stock always runs: what passes with torch's class is what the others have to pass",
    )
    parser.add_argument("--world-sizes", nargs="+", type=int, default=[2, 3], metavar="RANKS")
    parser.add_argument("--only", metavar="NAME", help="tests with this in their name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every result there")
    parser.add_argument("--list", action="store_true", help="print the tests and run none")
    parser.add_argument(
        "--show-output", action="store_true", help="let through what the tests print"
    )
    return parser


def _run_modes(
    names: Sequence[str], modes: Sequence[str], world_size: int, shows_output: bool
) -> list[Result]:
    """With torch's class all tests, with others those that passed with it."""
    results = _run_mode(names, STOCK, world_size, shows_output)
    counted = [result.test for result in results if result.outcome == PASSED]
    for mode in MODES:
        if mode in modes and mode != STOCK:
            results += _run_mode(counted, mode, world_size, shows_output)
    return results


def _run_mode(names: Sequence[str], mode: str, world_size: int, shows_output: bool) -> list[Result]:
    where = f"{mode}, {world_size} ranks"
    started = time.monotonic()
    results = []
    for result in run_tests(names, mode, world_size, shows_output):
        results.append(result)
        if sys.stderr.isatty():
            print(f"\r{where}: {len(results)} of {len(names)}", end=" ", file=sys.stderr)
            sys.stderr.flush()
    seconds = f"{time.monotonic() - started:.0f} s with the start of ranks"
    print(f"\r{where}: {len(results)} tests in {seconds}", file=sys.stderr, flush=True)
    return results

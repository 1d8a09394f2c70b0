"""The command line: which tests run in which modes, and what the exit code says."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.upstream.report import Report, unknown_names
from tests.upstream.results import PASSED, Result, write_json
from tests.upstream.running import run_tests
from tests.upstream.subject import STOCK, Subject


def main(subject: Subject, arguments: Sequence[str] | None = None) -> int:
    """0 if all is as it should be, else 1; 2 for a command line that says nothing to run."""
    options = _parser(subject).parse_args(arguments)
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
    # Ranks mostly wait for one another: those of one world size leave room for the others'.
    with ThreadPoolExecutor() as threads:
        runs = threads.map(
            lambda size: _run_modes(subject, chosen[size], size, options),
            options.world_sizes,
        )
        results = [result for run in runs for result in run]
    report = Report(results, subject, is_full=chosen == names)
    report.print()
    if options.json is not None:
        write_json(options.json, results)
    found = [*unknown_names(subject), *report.problems()]
    if found:
        print("\n" + "\n".join(f"PROBLEM: {line}" for line in found))
    return int(bool(found))


def _parser(subject: Subject) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=f"PyTorch's own tests of {subject.title} in several modes, on gloo and the CPU."
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=subject.modes,
        default=list(subject.modes),
        help="stock always runs: what passes in it is what the others have to pass",
    )
    parser.add_argument(
        "--world-sizes", nargs="+", type=int, default=list(subject.world_sizes), metavar="RANKS"
    )
    parser.add_argument("--only", metavar="NAME", help="tests with this in their name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every result there")
    parser.add_argument("--list", action="store_true", help="print the tests and run none")
    parser.add_argument(
        "--show-output", action="store_true", help="let through what the tests print"
    )
    return parser


def _run_modes(
    subject: Subject, names: Sequence[str], world_size: int, options: argparse.Namespace
) -> list[Result]:
    """In mode stock all tests, in the others those that passed in it."""
    results = _run_mode(subject, names, STOCK, world_size, options.show_output)
    counted = [result.test for result in results if result.outcome == PASSED]
    for mode in subject.least_shares:
        if mode in options.modes:
            results += _run_mode(subject, counted, mode, world_size, options.show_output)
    return results


def _run_mode(
    subject: Subject, names: Sequence[str], mode: str, world_size: int, shows_output: bool
) -> list[Result]:
    where = f"{mode}, {world_size} ranks"
    started = time.monotonic()
    results = []
    for result in run_tests(subject, names, mode, world_size, shows_output):
        results.append(result)
        if sys.stderr.isatty():
            print(f"\r{where}: {len(results)} of {len(names)}", end=" ", file=sys.stderr)
            sys.stderr.flush()
    seconds = f"{time.monotonic() - started:.0f} s with the start of ranks"
    print(f"\r{where}: {len(results)} tests in {seconds}", file=sys.stderr, flush=True)
    return results

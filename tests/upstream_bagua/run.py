"""Bagua's own tests and examples, from its PyPI release, run against bagua_compat.

    python tests/upstream_bagua/run.py
    python tests/upstream_bagua/run.py --devices 2 --only test_communicator
    python tests/upstream_bagua/run.py --devices 0 --seconds 200 --json bagua.json

``--devices 0`` is this machine as it is: without a GPU only Bagua's CPU tests do not skip,
with GPUs only its GPU tests, with a rank on each. With 2 or 4 the CPU is called so many GPUs, over
gloo, and only its GPU tests do not skip. The examples run on two ranks, one of them on 8.

The tests take ports from 8000 to 8100 and from 9000 to 9100, and give their ranks 60 s: run them
one at a time, on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

# Before all other folders: Bagua's tests are a package of the same name.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.upstream_bagua.bagua_examples import EXAMPLES, Example, run_example, write_digits
from tests.upstream_bagua.running import (
    EXCLUDED,
    FAILED,
    PASSED,
    SHARED_GPU,
    SKIPPED,
    Result,
    copy_release,
    files,
    run_file,
)

OUTCOMES = (PASSED, SKIPPED, EXCLUDED, FAILED)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if no test failed, else 1; 2 if there is none of that name."""
    began = time.monotonic()
    options = _parser().parse_args(arguments)
    if options.share_gpu:
        os.environ[SHARED_GPU] = "1"
    results: dict[int, list[Result]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_release(folder)
        write_digits(folder)
        chosen = [file for file in files(folder) if options.only in file]
        examples = [each for each in EXAMPLES if options.only in str(each)]
        if not chosen and not examples:
            print(f"no test file has {options.only} in its name", file=sys.stderr)
            return 2
        left = []
        for devices in options.devices:
            _print_heading(devices)
            results[devices] = []
            for one in (*chosen, *(examples if devices <= 2 else ())):
                if time.monotonic() >= began + options.seconds:
                    left.append(str(one))
                    continue
                if isinstance(one, Example):
                    found = [run_example(one, folder, devices, options.show_output)]
                else:
                    found = list(run_file(folder, one, devices, options.show_output))
                _print_line(str(one), found)
                results[devices] += found
                if options.json is not None:
                    _write(options.json, results)
            _print_sum(results[devices])
    if left:
        print(f"\nINCOMPLETE: not begun within {options.seconds:g} s: {', '.join(left)}")
    return int(any(each.outcome == FAILED for found in results.values() for each in found))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Bagua's own tests with bagua_compat.")
    parser.add_argument("--devices", nargs="+", type=int, default=[0, 2], metavar="N",
                        help="0: this machine as it is; else the CPU is called N GPUs")  # fmt: skip
    parser.add_argument("--share-gpu", action="store_true",
                        help="call the only GPU N GPUs in place of the CPU")  # fmt: skip
    parser.add_argument("--only", default="", metavar="NAME", help="files named so, in part")
    parser.add_argument("--seconds", type=float, default=math.inf,
                        help="after which no file of tests and no example is begun")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every result there")
    parser.add_argument("--show-output", action="store_true", help="print what the tests print")
    return parser


def _write(path: Path, results: Mapping[int, Sequence[Result]]) -> None:
    content = {devices: [asdict(each) for each in found] for devices, found in results.items()}
    path.write_text(json.dumps(content, indent=1) + "\n")


def _print_heading(devices: int) -> None:
    print(f"\n{_named(devices)}")
    columns = "".join(f"{outcome:>9}" for outcome in OUTCOMES)
    print(f"{'file':<58}{columns}{'seconds':>9}", flush=True)


def _print_sum(results: Sequence[Result]) -> None:
    _print_line("all", results)
    for outcome in OUTCOMES[1:]:
        for why in dict.fromkeys(each.reason for each in results if each.outcome == outcome):
            tests = [e.test for e in results if (e.outcome, e.reason) == (outcome, why)]
            shown = tests if outcome != SKIPPED else [f"{len(tests)} tests"]
            print(f"{outcome}: {', '.join(shown)}: {why}")


def _print_line(name: str, results: Sequence[Result]) -> None:
    counts = Counter(each.outcome for each in results)
    columns = "".join(f"{counts[outcome]:>9}" for outcome in OUTCOMES)
    seconds = sum(each.seconds for each in results)
    print(f"{name:<58}{columns}{seconds:>9.0f}", flush=True)


def _named(devices: int) -> str:
    called = "one GPU" if SHARED_GPU in os.environ else "the CPU"
    return f"{called} as {devices} GPUs" if devices else "this machine as it is"


if __name__ == "__main__":
    sys.exit(main())

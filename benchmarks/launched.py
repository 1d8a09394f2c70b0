"""Unchanged scripts tuned by the launcher, compared with a sweep of their bucket_cap_mb."""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cells.conditions import conditions
from cells.spread import ratio, spread
from harness import print_table, write_json
from testbed import Network, Testbed
from turns.job import JobError, SteppedJob

SCRIPTS = Path(__file__).resolve().parents[1] / "examples" / "unmodified"
STEPS = "1000000"
KINDS: Mapping[str, tuple[Sequence[str], str]] = {
    "stock": (("stock_ddp.py", "--steps", STEPS), "--bucket-cap-mb"),
    "accelerate": (("accelerate_loop.py", "--steps", STEPS), "--bucket-cap-mb"),
    "trainer": (("hf_trainer.py", "--max_steps", STEPS), "--ddp_bucket_cap_mb"),
}
"""A script with its arguments, and its own option for the size of a bucket."""
DEFAULT, TUNED = "default", "launched and tuned"
SWEEP_MIB = (1, 2, 5, 10, 50)
GOAL = 1.02
"""Step time at the end over that of the best of the sweep."""
WARMUP_STEPS = 1
"""Of each turn; not counted."""
TURN_SECONDS = 120.0
Blocks = list[list[float]]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scripts", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--network", type=Network.parse, default=Network(1e9))
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=SWEEP_MIB, metavar="MIB",
                        help="bucket_cap_mb values of the sweep, with torch's default")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=6, help="turns of each setting")
    parser.add_argument("--steps", type=int, default=4, help="steps measured in a turn")
    parser.add_argument("--time", type=float, default=300.0, metavar="SECONDS",
                        help="longest time for a tuning")  # fmt: skip
    parser.add_argument("--max-samples", default="60", help="maximum number of trials of a tuning")
    parser.add_argument("--loopback", action="store_true",
                        help="run over loopback if hosts cannot be emulated")  # fmt: skip
    parser.add_argument("--output", type=Path, default=Path("build/launched.json"))
    return parser.parse_args(argv)


def measure(name: str, options: argparse.Namespace, testbed: Testbed, folder: Path) -> Any:
    """Tune the script, then let it and those of its sweep make their steps in turns."""
    (script, *given), size_option = KINDS[name]
    program = [str(SCRIPTS / script), *given]
    token = secrets.token_urlsafe(16)
    url = testbed.serve(folder / "autotune.db", token, log=folder / "service.log")
    variables = {
        "BAGUA_AUTOTUNE": "1",
        "BAGUA_AUTOTUNE_URL": url,
        "BAGUA_AUTOTUNE_TOKEN": token,
        "BAGUA_AUTOTUNE_MAX_SAMPLES": options.max_samples,
    }
    began = time.monotonic()
    tuned = SteppedJob(testbed, folder / "tuned", program, ("-m", "bagua_client"), variables)
    jobs = {TUNED: tuned}
    try:
        found = tuned.wait(options.time)[0]
        tuning_seconds = time.monotonic() - began
        print(f"{name}: {found['words']} after {found['steps']} steps, {tuning_seconds:.0f} s",
              flush=True)  # fmt: skip
        for size in (None, *options.sizes):
            what = DEFAULT if size is None else f"{size} MiB"
            words = [] if size is None else [size_option, str(size)]
            jobs[what] = SteppedJob(testbed, folder / what, [*program, *words])
        for job in jobs.values():
            job.wait(TURN_SECONDS)
        arms = in_turns(jobs, options.rounds, options.steps)
    finally:
        for job in jobs.values():
            job.kill()
    return {
        "script": script,
        "configuration": found["configuration"],
        "words": found["words"],
        "tuning_steps": found["steps"],
        "tuning_seconds": tuning_seconds,
        "arms": arms,
    }


def in_turns(jobs: Mapping[str, SteppedJob], rounds: int, steps: int) -> dict[str, Blocks]:
    """Seconds of each step, by round; those of a round run right after each other."""
    arms: dict[str, Blocks] = {what: [] for what in jobs}
    for number in range(rounds):
        names = list(jobs)
        first = number % len(names)
        for what in names[first:] + names[:first]:
            seconds = jobs[what].make(WARMUP_STEPS + steps, TURN_SECONDS)
            arms[what].append(seconds[WARMUP_STEPS:])
    return arms


def show(name: str, found: Mapping[str, Any]) -> bool:
    """Print what a script showed; whether it is as good as the best of its sweep."""
    arms: Mapping[str, Blocks] = found["arms"]
    best = min(
        (what for what in arms if what != TUNED), key=lambda what: spread(arms[what]).seconds
    )
    rows = []
    for what, blocks in arms.items():
        times, over = spread(blocks), ratio(arms[best], blocks)
        rows.append([
            what, f"{1e3 * times.seconds:.1f}", f"{1e3 * times.low:.1f} to {1e3 * times.high:.1f}",
            f"{over.paired_ratio:.3f}", f"{over.low:.3f} to {over.high:.3f}",
        ])  # fmt: skip
    print(f"\n{name} ({found['script']}): left at {found['words']} after {found['tuning_steps']} "
          f"steps, {found['tuning_seconds']:.0f} s")  # fmt: skip
    print_table(["bucket_cap_mb", "ms a step", "95 %", f"over {best}", "95 %"], rows)
    over = ratio(arms[best], arms[TUNED])
    is_good = over.paired_ratio <= GOAL
    print(f"{'met' if is_good else 'MISSED'}: {over.paired_ratio:.3f} of the best of the sweep "
          f"({best}), at most {GOAL:g}", flush=True)  # fmt: skip
    return is_good


def main() -> None:
    options = arguments()
    for name in [name for name in os.environ if name.startswith("BAGUA_")]:
        del os.environ[name]
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    size = options.nodes, options.ranks_per_node
    scripts: dict[str, Any] = {}
    failures: dict[str, str] = {}
    good: list[bool] = []
    with (
        tempfile.TemporaryDirectory() as logs,
        Testbed(options.network, *size, ordinary_priority=True) as testbed,
    ):
        if testbed.fallback and not options.loopback:
            sys.exit(f"launched.py: {testbed.fallback}; --loopback measures all the same")
        where = conditions(testbed)
        for name in options.scripts:
            folder = Path(logs, name)
            folder.mkdir()
            try:
                scripts[name] = measure(name, options, testbed, folder)
                good.append(show(name, scripts[name]))
            except JobError as error:
                failures[name] = str(error)
                print(f"{name}: FAILED: {error}", file=sys.stderr, flush=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "command": sys.argv,
        "network": str(options.network),
        "fallback": testbed.fallback,
        "conditions": where,
        "scripts": scripts,
        "failures": failures,
    }
    write_json(options.output, result)
    sys.exit(0 if all(good) and not failures else 1)


if __name__ == "__main__":
    # So that a testbed cleans up after itself when it is told to end, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    main()

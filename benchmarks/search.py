"""Search engines on simulated jobs: trials until near the optimum, and the cost of the search.

Ours, with and without its cost model, random search, Optuna's two samplers and Bagua's own
optimiser look for the fastest configuration of the same simulated jobs, under the same noise: that
of a trial's whole score, with a straggler in 3 % of the trials.  Medians over problems and seeds:

- to within: the first trial that runs a configuration truly so near the optimum;
- ends within: the share of the runs that leave the job so near it after the last trial;
- lost: by what all trials together were slower than the optimum, in steps (one a trial);
- ms: from telling a trial's score to the next proposal.

    python benchmarks/search.py --json search.json
    python benchmarks/search.py --problems 4 --noise 0.05 --seeds 1
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

sys.path.append(str(Path(__file__).parents[1]))  # where benchmarks and tests are

from bagua_simulator import cases
from benchmarks.support.harness import write_json
from benchmarks.support.searches import bagua_optimizer
from benchmarks.support.searches.engines import ENGINES
from benchmarks.support.searches.landscape import SPACES
from benchmarks.support.searches.runs import Run, Setting, as_json, run, show

NOISES = (0.01, 0.05, 0.1)
TRIALS = 60


def settings(options: argparse.Namespace) -> list[Setting]:
    """Every run that was asked for."""
    return [
        Setting(engine, space, problem, noise, seed, TRIALS)
        for problem, space in product(_problem_names(options.problems), SPACES)
        for engine, noise, seed in product(options.engines, options.noise, range(options.seeds))
    ]


def _problem_names(count: int) -> list[str]:
    """A few are drawn, so that they are of different models and networks."""
    names = [case.name for case in cases()]
    return random.Random(0).sample(names, min(count, len(names)))


def run_all(settings: Sequence[Setting]) -> list[Run]:
    """In as many processes as there are cores."""
    context = multiprocessing.get_context("spawn")
    with context.Pool() as pool, Progress(console=Console(stderr=True)) as bar:
        return list(bar.track(pool.imap(run, settings), len(settings), description="searching"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    known = len(cases())
    parser.add_argument("--engines", nargs="+", choices=[*ENGINES], default=[*ENGINES])
    parser.add_argument(
        "--problems", type=int, default=known, help=f"how many of the {known} problems"
    )
    parser.add_argument("--noise", nargs="+", type=float, default=[*NOISES])
    parser.add_argument("--seeds", type=int, default=3, help="seeds for each problem")
    parser.add_argument(
        "--json", type=Path, help="also write the figures and every run to this file"
    )
    return parser.parse_args()


def main() -> None:
    options = parse()
    # The processes share the machine; more threads than cores only make them slower.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if "bagua" in options.engines:
        bagua_optimizer.prepare()
    runs = run_all(settings(options))
    show(runs)
    if options.json:
        write_json(options.json, {"benchmark": "search", **as_json(runs)})


if __name__ == "__main__":
    main()

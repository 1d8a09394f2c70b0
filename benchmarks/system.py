"""Whether ``bagua-autotune system`` finds the best of a job's arguments, beside a grid of all.

Two ranks over gloo on this machine train with Megatron's arguments (see
support/jobs/megatron_like.py) under a limit of memory, ``ulimit -v``, that not all arguments fit
in. First each allowed combination runs once, in a random order; then ``bagua-autotune system``
searches the same ones with half as many runs; at the end what it found and the grid's best run in
turns. Runs that have no memory left are counted.

    python benchmarks/system.py --json system.json          # some 20 minutes, alone on the machine
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).parents[1]))  # where benchmarks are

from bagua_runs.asked import Options, asked_settings, searched
from bagua_runs.job import Job
from bagua_runs.outcomes import Outcome, Run, StepTimes
from bagua_runs.report import describe_changes
from bagua_runs.search import FEWEST_RUNS, SystemSearch
from bagua_runs.space import SearchSpace
from bagua_wire.configuration import Configuration
from benchmarks.support.harness import print_table

SCRIPT = Path(__file__).parent / "support" / "jobs" / "megatron_like.py"
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
# All but the largest --kept-layers fit: it takes 48 GiB, and the next one 36.
LIMIT_GIB = 44
OWN = ("--ddp-bucket-size", "40000000", "--kept-layers", "0")
SETTINGS = Options(
    arguments=(
        "--overlap-grad-reduce",
        "--ddp-bucket-size=400000,1200000,2400000,4800000",
        "--overlap-param-gather",
        "--kept-layers=0,6,12,18,24",
    ),
    only_with=(
        ("--ddp-bucket-size", "--overlap-grad-reduce=on"),
        ("--overlap-param-gather", "--overlap-grad-reduce=on"),
    ),
    takes_memory=("--kept-layers",),
)
NEAR = 1.05
TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True)
class Counts:
    """Runs that gave no step time: those that had no memory left, and others."""

    out_of_memory: int
    failed: int

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> Counts:
        bad = [outcome for outcome in outcomes if outcome.cost is None]
        short = sum(outcome.is_out_of_memory for outcome in bad)
        return cls(short, len(bad) - short)


@dataclass(frozen=True)
class Result:
    """The outcome of a round.

    Attributes:
        combinations: in the grid.
        search_runs: of all kinds.
        best: of the grid, the settings that differ from the job's own; ``found``: by the search.
        own_seconds: of a step, the median of the runs in turns; of the others, too.
        ratio: of found to best, the median over the turns.
    """

    combinations: int
    grid_counts: Counts
    search_runs: int
    search_counts: Counts
    best: dict[str, str]
    found: dict[str, str]
    own_seconds: float
    best_seconds: float
    found_seconds: float
    ratio: float


def command(script: Sequence[str]) -> list[str]:
    """Two ranks of the script, under the limit of memory."""
    limited = ["bash", "-c", f'ulimit -v {LIMIT_GIB * 2**20}; exec "$0" "$@"']
    return [*limited, *LAUNCHER, str(SCRIPT), *script]


class Bench:
    """One round.

    Args:
        script: further arguments of the job.
        steps: measured in each run.
        seed: of the orders and of the search.
        only: vary only these settings; empty: all.
    """

    def __init__(
        self, script: Sequence[str], steps: int, seed: int, only: Sequence[str] = ()
    ) -> None:
        job_command = command([*OWN, *script])
        asked = asked_settings(SETTINGS, job_command, {})
        places = {name: setting.place for name, setting in asked.settings.items()}
        self.space = SearchSpace(searched(asked.settings, only), seed)
        self._job = Job(job_command, StepTimes(steps), lambda: False, places)
        self._seed = seed

    def run(self, changes: Mapping[str, str], timeout_seconds: float = TIMEOUT_SECONDS) -> Outcome:
        """Run the job once."""
        outcome = self._job(changes, timeout_seconds)
        what = outcome.failure or f"{1000 * (outcome.score or 0):.1f} ms a step"
        print(f"{describe_changes(changes)}: {what}", file=sys.stderr, flush=True)
        return outcome

    def grid(self) -> dict[Configuration, Outcome]:
        """Each combination once. Raises RuntimeError if the job fails with its own settings."""
        candidates = self.space.candidates
        order = random.Random(self._seed).sample(candidates, len(candidates))
        found = {c: self.run(self.space.changes(c)) for c in order}
        if found[self.space.own].cost is None:
            raise RuntimeError(f"the job fails as it is: {found[self.space.own].failure}")
        return found

    def search(self, most_runs: int) -> tuple[Configuration, list[Run]]:
        """What a search finds, and its runs."""
        print(f"a search with at most {most_runs} runs", file=sys.stderr, flush=True)
        search = SystemSearch(self.space, self.run, most_runs, TIMEOUT_SECONDS)
        return search.find().configuration, search.runs

    def in_turns(
        self, configurations: Sequence[Configuration], pairs: int
    ) -> dict[Configuration, list[float]]:
        """Seconds of a step of each configuration, in turns; who goes first alternates."""
        found: dict[Configuration, list[float]] = {c: [] for c in configurations}
        for pair in range(pairs):
            for c in list(found)[:: -1 if pair % 2 else 1]:
                found[c].append(self.run(self.space.changes(c)).score or math.nan)
        return found

    def result(self, pairs: int) -> Result:
        """Run all."""
        grid = self.grid()
        costs = {c: outcome.cost for c, outcome in grid.items() if outcome.cost is not None}
        best = min(costs, key=lambda c: (costs[c], str(c)))
        found, runs = self.search(max(len(grid) // 2, FEWEST_RUNS))
        turns = self.in_turns([self.space.own, best, found], pairs)
        own_seconds, best_seconds, found_seconds = (
            median(turns[c]) for c in (self.space.own, best, found)
        )
        ratios = [mine / theirs for mine, theirs in zip(turns[found], turns[best], strict=True)]
        return Result(
            combinations=len(grid),
            grid_counts=Counts.of(grid.values()),
            search_runs=len(runs),
            search_counts=Counts.of([done.outcome for done in runs]),
            best=self.space.changes(best),
            found=self.space.changes(found),
            own_seconds=own_seconds,
            best_seconds=best_seconds,
            found_seconds=found_seconds,
            ratio=median(ratios),
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30, help="steps measured in each run")
    parser.add_argument("--pairs", type=int, default=5, help="turns at the end")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one whole round each")
    parser.add_argument(
        "--only", action="append", default=[], metavar="=NAME", help="vary only this setting"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    given = parser.parse_args(arguments)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = [Bench((), given.steps, seed, given.only).result(given.pairs) for seed in given.seeds]
    if given.json:
        given.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    tell(results)


def tell(results: Sequence[Result]) -> None:
    """Print a row for each round."""
    header = ["round", "grid", "no memory", "failed", "search", "no memory", "failed",
              "own ms", "best ms", "found ms", "found over best"]  # fmt: skip
    rows = [
        [
            *map(str, (number, r.combinations, r.grid_counts.out_of_memory, r.grid_counts.failed)),
            *map(str, (r.search_runs, r.search_counts.out_of_memory, r.search_counts.failed)),
            *(f"{1000 * s:.1f}" for s in (r.own_seconds, r.best_seconds, r.found_seconds)),
            f"{r.ratio:.3f}",
        ]
        for number, r in enumerate(results)
    ]
    print_table(header, rows)
    near = sum(result.ratio <= NEAR for result in results)
    print(f"within {NEAR - 1:.0%} of the grid's best in half its runs: {near} of {len(results)}")
    for number, result in enumerate(results):
        print(f"{number}: best {describe_changes(result.best)}")
        print(f"{number}: found {describe_changes(result.found)}")


if __name__ == "__main__":
    main()

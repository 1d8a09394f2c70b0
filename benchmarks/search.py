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
import math
import multiprocessing
import os
import random
import sys
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

sys.path.append(str(Path(__file__).parents[1]))  # where benchmarks and tests are

from bagua_simulator import cases
from benchmarks.support.harness import print_table, write_json
from benchmarks.support.searches.engines import ENGINES, PEERS, find_bagua
from benchmarks.support.searches.landscape import SPACES, load

NOISES = (0.01, 0.05, 0.1)
TRIALS = 60
TOLERANCES = (0.05, 0.02, 0.01)
GOAL_NOISE = 0.05
PROPOSAL_MS = 50
Group = tuple[str, float]
Goal = tuple[str, str, bool]
"""What is asked for, what was found, and whether that meets it."""


@dataclass(frozen=True)
class Setting:
    """What is run. ``noise`` is the standard deviation of the logarithm of a trial's score."""

    engine: str
    space: str
    problem: str
    noise: float
    seed: int
    trials: int


@dataclass(frozen=True)
class Run:
    """What one search came to.

    Attributes:
        excess: of each trial, by which part of the optimum's time it is truly slower.
        final_excess: the same of the configuration that the job is left at.
        decision_seconds: of each trial, from telling what it measured to the next proposal.
    """

    setting: Setting
    excess: tuple[float, ...]
    final_excess: float
    decision_seconds: tuple[float, ...]

    def trials_to_within(self, tolerance: float) -> float:
        """The number of the first trial at most so far from the optimum; infinite if none is."""
        near = (n for n, excess in enumerate(self.excess, 1) if excess <= tolerance)
        return next(near, math.inf)

    @property
    def lost_steps(self) -> float:
        """What the trials cost over running the optimum, at one step each."""
        return sum(self.excess)


@dataclass(frozen=True)
class Figures:
    """Of some runs. By tolerance: the median trial, and the share of runs, 0 to 1."""

    runs: int
    trials_to_within: dict[float, float]
    ends_within: dict[float, float]
    lost_steps: float
    mean_lost_steps: float
    decision_ms: float

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Figures:
        return cls(
            runs=len(runs),
            trials_to_within={t: median(r.trials_to_within(t) for r in runs) for t in TOLERANCES},
            ends_within={t: fmean(r.final_excess <= t for r in runs) for t in TOLERANCES},
            lost_steps=median(r.lost_steps for r in runs),
            mean_lost_steps=fmean(r.lost_steps for r in runs),
            decision_ms=1000 * median(s for r in runs for s in r.decision_seconds),
        )


def run(setting: Setting) -> Run:
    """Let an engine search. In its nth trial every engine meets the same noise."""
    landscape = _landscape(setting.problem, setting.space)
    engine = ENGINES[setting.engine](landscape, setting.seed)
    configuration = engine.ask()
    excess, decisions = [], []
    for trial in range(setting.trials):
        excess.append(landscape.excess(configuration))
        measured = landscape.measure(configuration, setting.noise, _generator(setting, trial))
        started = time.perf_counter()
        engine.tell(configuration, measured)
        configuration = engine.ask()
        decisions.append(time.perf_counter() - started)
    final_excess = landscape.excess(engine.best())
    return Run(setting, tuple(excess), final_excess, tuple(decisions))


# One process runs many settings of a problem: its true times are worked out once.
_landscape = cache(load)


def _generator(setting: Setting, trial: int) -> np.random.Generator:
    problem = zlib.crc32(setting.problem.encode())
    return np.random.default_rng([problem, round(1e6 * setting.noise), setting.seed, trial])


def by_group(runs: Iterable[Run]) -> dict[Group, dict[str, Figures]]:
    """Figures of each engine by space and noise."""
    grouped: dict[Group, dict[str, list[Run]]] = {}
    for run in runs:
        setting = run.setting
        group = setting.space, setting.noise
        grouped.setdefault(group, {}).setdefault(setting.engine, []).append(run)
    return {
        group: {engine: Figures.of(members) for engine, members in grouped[group].items()}
        for group in sorted(grouped, key=lambda g: ([*SPACES].index(g[0]), g[1]))
    }


def show(runs: Sequence[Run]) -> None:
    """A table for each space and noise, then the goals."""
    trials = runs[0].setting.trials
    groups = by_group(runs)
    for (space, noise), engines in groups.items():
        _print(
            f"{space} space ({', '.join(SPACES[space])}), {noise:.0%} noise: "
            f"{trials} trials in {max(of.runs for of in engines.values())} runs",
            [
                "engine",
                *(f"to within {t:.0%}" for t in TOLERANCES),
                *(f"ends within {t:.0%}" for t in TOLERANCES),
                *("lost", "mean lost", "ms"),
            ],
            [
                [
                    engine,
                    *(_trials(of.trials_to_within[t], trials) for t in TOLERANCES),
                    *(f"{of.ends_within[t]:.0%}" for t in TOLERANCES),
                    *(f"{of.lost_steps:.2f}", f"{of.mean_lost_steps:.2f}"),
                    f"{of.decision_ms:.1f}",
                ]
                for engine, of in engines.items()
            ],
        )
    goals = _goals(groups)
    rows = [[what, found, "met" if is_met else "not met"] for what, found, is_met in goals]
    if rows:
        _print("goals (for 60 trials)", ["goal", "found", ""], rows)


def as_json(runs: Sequence[Run]) -> dict[str, Any]:
    """Figures and every run; a trial that never came is null."""
    figures = [
        {"space": space, "noise": noise, "engine": engine}
        | asdict(of)
        | {
            "trials_to_within": {
                str(t): n if math.isfinite(n) else None for t, n in of.trials_to_within.items()
            }
        }
        for (space, noise), engines in by_group(runs).items()
        for engine, of in engines.items()
    ]
    every = [
        asdict(run.setting)
        | {
            "excess": [round(excess, 5) for excess in run.excess],
            "final_excess": run.final_excess,
            "decision_ms": round(1000 * median(run.decision_seconds), 2),
        }
        for run in runs
    ]
    return {"figures": figures, "runs": every}


def _goals(groups: dict[Group, dict[str, Figures]]) -> list[Goal]:
    """Those that were asked for at 5 % noise, as far as the engines were run."""
    goals: list[Goal] = []
    small = groups.get(("small", GOAL_NOISE), {})
    large = groups.get(("large", GOAL_NOISE), {})
    for space, engines, tolerance, most in (("small", small, 0.02, 3), ("large", large, 0.01, 6)):
        if ours := engines.get("ours"):
            found = ours.trials_to_within[tolerance]
            goals.append(
                (f"{space}: within {tolerance:.0%} in {most} or less", f"{found:g}", found <= most)
            )
            is_quick = ours.decision_ms <= PROPOSAL_MS
            goals.append(
                (f"{space}: proposal in {PROPOSAL_MS} ms", f"{ours.decision_ms:.1f} ms", is_quick)
            )
    if ours := small.get("ours"):
        share = ours.ends_within[0.02]
        goals.append(("small: over 90% end within 2%", f"{share:.0%}", share > 0.9))
        if bagua := small.get("bagua"):
            goals.append(_lost("small: lost at most a tenth of bagua's", ours, bagua, 0.1))
    peers = [large[name] for name in PEERS if name in large]
    if (ours := large.get("ours")) and peers:
        best = min(peers, key=lambda of: of.lost_steps)
        goals.append(_lost("large: lost at most half of the best peer's", ours, best, 0.5))
    return goals


def _lost(what: str, ours: Figures, other: Figures, most: float) -> Goal:
    found = f"{ours.lost_steps:.2f} of {other.lost_steps:.2f}"
    return what, found, ours.lost_steps <= most * other.lost_steps


def _print(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print(title)
    print_table(columns, [*rows])
    print()


def _trials(found: float, trials: int) -> str:
    return f"{found:g}" if math.isfinite(found) else f"over {trials}"


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
        find_bagua()
    runs = run_all(settings(options))
    show(runs)
    if options.json:
        write_json(options.json, {"benchmark": "search", **as_json(runs)})


if __name__ == "__main__":
    main()

"""Whole tunings of simulated jobs: does the tuner keep the best, at what cost, and under drift?

python benchmarks/tuning.py --json tuning.json
python benchmarks/tuning.py --parts noise --json noise.json    # 1,800 tunings, some 25 minutes
python benchmarks/tuning.py --parts "bad moment" --tunings 160
python benchmarks/tuning.py --parts noise --beside ../today --rivals halving gp-ei optuna-gp bagua
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # where benchmarks and tests are

from bagua_autotune.search import names
from bagua_autotune.search.searcher import USUAL
from bagua_autotune.store import Store
from bagua_autotune.tuning.background import TunerListener
from bagua_autotune.tuning.tuner import Tuner
from bagua_simulator import Simulator, cases
from bagua_wire.configuration import Configuration
from benchmarks.support.harness import as_given, print_table, write_json
from benchmarks.support.noise import bad_moment
from benchmarks.support.noise import tunings as noise
from benchmarks.support.noise.cases import new_seed
from benchmarks.support.noise.rivals import RIVALS
from benchmarks.support.searches.engines import find_bagua
from tests.autotune.simulated_job import SimulatedJob, truth

MOST_STEPS, QUIET_STEPS = 3000, 10_000
NOISE, BAD_MOMENT = "noise", "bad moment"
NOTICED = 0.08  # the watch tells changes of 5 % and more from noise
Row = Mapping[str, Any]
Figures = Mapping[str, str]


class Decisions(TunerListener):
    """How long decisions took."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_decided(self, seconds: float) -> None:
        self.seconds.append(seconds)


def gain(seeds: int, noise: float) -> list[Row]:
    """Jobs at the usual baseline: what is kept, against the true best."""
    return [
        _tuned(case.simulator, case.name, seed, noise) for case in cases() for seed in range(seeds)
    ]


def best_already(jobs: int, noise: float) -> list[Row]:
    """Jobs whose baseline is the true best."""
    found: list[Row] = []
    named = cases()
    for job in range(jobs):
        case = named[job % len(named)]
        times = truth(case.simulator)
        best = min(times, key=times.__getitem__)
        found.append(_tuned(case.simulator, case.name, job, noise, best))
    return found


def _tuned(
    simulator: Simulator, name: str, seed: int, noise: float, default: Configuration | None = None
) -> Row:
    decisions = Decisions()
    store = Store("sqlite://")
    job = SimulatedJob(
        Tuner(store, listeners=[decisions]), simulator, "job", seed, noise, default=default
    )
    job.run(MOST_STEPS, until_finished=True)
    times = truth(simulator, job.baseline)
    result = job.status.result
    assert result is not None
    kept = job.true_seconds(job.configuration)
    row = {
        "problem": name,
        "seed": seed,
        "kept": result.kept,
        "kept_over_best": kept / min(times.values()) - 1,
        "baseline_over_best": job.true_seconds(job.baseline) / min(times.values()) - 1,
        "true_speedup": job.true_seconds(job.baseline) / kept,
        "is_in_interval": result.low <= job.true_seconds(job.baseline) / kept <= result.high,
        "steps": job.switches[-1].step - job.switches[0].step,
        "trials": result.trials,
        "lost_steps": job.lost_steps,
        "decision_seconds": decisions.seconds[1:],
    }
    store.close()
    return row


def drift(noise: float, quiet_steps: int) -> list[Row]:
    """A network that becomes slower for good, one that never does, a disturbance of 20 steps."""
    found: list[Row] = []
    for number, case in enumerate(cases()):
        slower = _slower(case.simulator, 4)
        calm = _tuned_job(case.simulator, number, noise)
        calm.run(quiet_steps)
        shaken = _tuned_job(case.simulator, number, noise)
        shaken.disturbed = partial(_disturbed_for_20_steps, shaken.step + 200)
        shaken.run(1000)
        job = _tuned_job(case.simulator, number, noise)
        job.run(300)
        before, changed_at, switches = job.configuration, job.step, len(job.switches)
        job.simulator = slower
        job.run(MOST_STEPS)
        times = truth(slower)
        change = slower.step_seconds(before) / case.simulator.step_seconds(before) - 1
        began = [switch.step for switch in job.switches[switches:]]
        found.append(
            {
                "problem": case.name,
                "change": change,
                "began_after_steps": began[0] - changed_at if began else None,
                "old_over_new_best": slower.step_seconds(before) / min(times.values()) - 1,
                "kept_over_new_best": job.true_seconds(job.configuration) / min(times.values()) - 1,
                "rounds": job.status.round,
                "rounds_when_quiet": calm.status.round,
                "rounds_when_disturbed": shaken.status.round,
            }
        )
    return found


def _disturbed_for_20_steps(begin: int, step: int) -> float:
    return 2.0 if begin <= step < begin + 20 else 1.0


def warm_start(noise: float) -> list[Row]:
    """The second run of a job, and the first of one that is similar."""
    found: list[Row] = []
    for number, case in enumerate(cases()):
        tuner = Tuner(Store("sqlite://"))
        first = SimulatedJob(tuner, case.simulator, "first", number, noise)
        first.run(MOST_STEPS, until_finished=True)
        second = SimulatedJob(tuner, case.simulator, "second", 1000 + number, noise)
        second.run(MOST_STEPS, until_finished=True)
        other = _slower(case.simulator, 2)
        similar = SimulatedJob(tuner, other, "similar", number, noise, fingerprint="another")
        similar.run(MOST_STEPS, until_finished=True)
        away = [s for s in second.switches if s.configuration != second.baseline]
        found.append(
            {
                "problem": case.name,
                "first_trials": first.status.progress.trials_measured,
                "first_lost_steps": first.lost_steps,
                "second_trials": second.status.progress.trials_measured,
                "second_lost_steps": second.lost_steps,
                "is_same": second.configuration == first.configuration,
                "stays_from_first_switch": all(s.configuration == first.configuration for s in away)
                and second.configuration == first.configuration,
                "similar_trials": similar.status.progress.trials_measured,
                "similar_lost_steps": similar.lost_steps,
            }
        )
    return found


def _tuned_job(simulator: Simulator, seed: int, noise: float) -> SimulatedJob:
    job = SimulatedJob(Tuner(Store("sqlite://")), simulator, "job", seed, noise)
    job.run(MOST_STEPS, until_finished=True)
    return job


def _slower(simulator: Simulator, factor: float) -> Simulator:
    cluster = simulator.cluster
    bandwidth = cluster.bandwidth_bytes_per_second / factor
    return Simulator(simulator.workload, replace(cluster, bandwidth_bytes_per_second=bandwidth))


def _share(rows: list[Row], test: Callable[[Row], bool]) -> str:
    return f"{sum(test(row) for row in rows) / len(rows):.1%}"


def _typical(rows: list[Row], key: str, form: str = ".1f") -> str:
    """Median and most."""
    values = [row[key] if row[key] is not None else math.inf for row in rows]
    return f"{median(values):{form}} ({max(values):{form}})"


def figures_of_tunings(rows: list[Row]) -> Figures:
    """Of jobs tuned once."""
    asked = [1e3 * seconds for row in rows for seconds in row["decision_seconds"]]
    lost = sorted(row["lost_steps"] for row in rows)
    winners = [row for row in rows if row["kept"] == "winner"]
    found = {
        "jobs": str(len(rows)),
        "kept within 1 % of the best": _share(rows, lambda r: r["kept_over_best"] <= 0.01),
        "kept within 2 % of the best": _share(rows, lambda r: r["kept_over_best"] <= 0.02),
        "slower than the baseline by over 1 %": _share(rows, lambda r: r["true_speedup"] < 0.99),
        "true speed-up": _typical(rows, "true_speedup", ".3f"),
        "steps from first to last switch": _typical(rows, "steps", ".0f"),
        "trials": _typical(rows, "trials", ".0f"),
        "steps lost": _typical(rows, "lost_steps"),
        "steps lost, 95 % below": f"{lost[int(0.95 * (len(lost) - 1))]:.1f}",
        "decision, ms": f"{median(asked):.0f} ({max(asked):.0f})",
    }
    if winners:
        found["winners in their interval"] = _share(winners, lambda r: r["is_in_interval"])
    return found


def figures_of_drift(rows: list[Row]) -> Figures:
    changed = [row for row in rows if row["change"] > NOTICED]
    return {
        "jobs": str(len(rows)),
        f"of those slower by over {NOTICED:.0%}": str(len(changed)),
        "new round begins after steps": _typical(changed, "began_after_steps", ".0f"),
        "old setting over the new best": _typical(changed, "old_over_new_best", ".1%"),
        "kept over the new best": _typical(changed, "kept_over_new_best", ".1%"),
        "rounds in all quiet steps": str(sum(row["rounds_when_quiet"] for row in rows)),
        "rounds after disturbances": str(sum(row["rounds_when_disturbed"] for row in rows)),
    }


def figures_of_warm_starts(rows: list[Row]) -> Figures:
    return {
        "jobs": str(len(rows)),
        "at the first run's best from the first switch on": _share(
            rows, lambda r: r["stays_from_first_switch"]
        ),
        "trials of the first run": _typical(rows, "first_trials", ".0f"),
        "trials of the second run": _typical(rows, "second_trials", ".0f"),
        "steps lost in the first run": _typical(rows, "first_lost_steps"),
        "steps lost in the second run": _typical(rows, "second_lost_steps"),
        "trials of a similar job": _typical(rows, "similar_trials", ".0f"),
        "steps lost in a similar job": _typical(rows, "similar_lost_steps"),
    }


FIGURES: Mapping[str, Callable[[list[Row]], Figures]] = {
    "gain": figures_of_tunings,
    "best already": figures_of_tunings,
    "drift": figures_of_drift,
    "warm start": figures_of_warm_starts,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", default="gain,best already,drift,warm start")
    parser.add_argument("--jobs", type=int, default=200, help="jobs whose baseline is the best")
    parser.add_argument("--seeds", type=int, default=2, help="seeds for each case of part gain")
    parser.add_argument(
        "--noise", type=float, default=0.05, help="of each step, in other parts than those below"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    of_noise = parser.add_argument_group("parts noise and bad moment")
    of_noise.add_argument(
        "--tunings", type=int, default=200, help="in each climate; with, and without a bad moment"
    )
    of_noise.add_argument("--processes", type=int, default=2, help="that run at a time")
    of_noise.add_argument(
        "--draw",
        type=int,
        default=new_seed(),
        help="the seed of the drawn jobs of an earlier run, to repeat it",
    )
    of_noise.add_argument(
        "--rivals",
        nargs="*",
        choices=RIVALS,
        default=[],
        help="of part noise: searches that get as many steps as ours took",
    )
    of_noise.add_argument(
        "--beside",
        type=Path,
        help="of part noise: a checkout of another commit, whose service tunes the same",
    )
    of_noise.add_argument(
        "--searcher", choices=names(), default=USUAL, help="what --beside runs has the usual one"
    )
    options = parser.parse_args()
    if options.beside and NOISE not in options.parts.split(","):
        parser.error(f"--beside needs the part {NOISE}")
    return options


def run_beside(options: argparse.Namespace) -> Sequence[Row]:
    """The same tunings in noise by the service of another checkout."""
    numbers = ("tunings", "processes", "draw")
    given = [f"--{name}={getattr(options, name)}" for name in numbers]
    return noise.rows_of(options.beside, [f"--parts={NOISE}", *given])[NOISE]


def main() -> None:
    options = parse()
    # The processes share the machine; more threads than cores only make them slower.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"drawn jobs: --draw {options.draw}")
    if "bagua" in options.rivals:
        find_bagua()
    run: dict[str, Callable[[], list[Row]]] = {
        "gain": lambda: gain(options.seeds, options.noise),
        "best already": lambda: best_already(options.jobs, options.noise),
        "drift": lambda: drift(options.noise, QUIET_STEPS),
        "warm start": lambda: warm_start(options.noise),
        NOISE: lambda: noise.run(
            options.tunings,
            options.processes,
            options.draw,
            tuple(options.rivals),
            options.searcher,
        ),
        BAD_MOMENT: lambda: bad_moment.run(
            options.tunings, options.processes, options.draw, options.searcher
        ),
    }
    parts: dict[str, list[Row]] = {}
    for part in options.parts.split(","):
        began = time.monotonic()
        parts[part] = run[part]()
        print(f"{part}: {time.monotonic() - began:.0f} s")
    others = run_beside(options) if options.beside else ()
    figures = {part: FIGURES[part](rows) for part, rows in parts.items() if part in FIGURES}
    rows = [(part, *figure) for part, found in figures.items() for figure in found.items()]
    if rows:
        print_table(("part", "figure", "median (most)"), rows)
    if NOISE in parts:
        figures |= noise.show(parts[NOISE], others)
    if BAD_MOMENT in parts:
        figures |= bad_moment.show(parts[BAD_MOMENT])
    if options.json:
        measured = {"options": as_given(options), "service": str(noise.source_root())}
        measured |= {"figures": figures, "parts": parts, "beside": {NOISE: others}}
        write_json(options.json, measured)


if __name__ == "__main__":
    main()

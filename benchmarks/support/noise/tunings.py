"""Tunings by the real tuner in each climate."""

from __future__ import annotations

import logging
import math
import multiprocessing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, median
from typing import Any

from bagua_autotune.model.knobs import Configuration
from bagua_autotune.store import Store
from bagua_autotune.tuning.tuner import Tuner
from benchmarks.support.noise.unseen import cases
from benchmarks.support.noise.weather import CLIMATES, Climate, Weather
from benchmarks.support.simulated_job import SimulatedJob, truth

MOST_STEPS = 3000
SLOWER = 0.005
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Setting:
    """One tuning: the problem's place in the list, and the weather's."""

    problem: int
    climate: Climate
    seed: int


class WeatheredJob(SimulatedJob):
    """A simulated job whose steps are disturbed by a climate's weather, and by nothing else."""

    weather: Weather

    def _switch(self) -> None:
        before = self.configuration, self._trial
        super()._switch()
        if before != (self.configuration, self._trial):
            self.weather.new_block()


_problems = cache(cases)


@cache
def _truth(place: int) -> dict[Configuration, float]:
    return truth(_problems()[place].simulator)


def tune(setting: Setting) -> Row:
    """Tune one job; how it ended, beside the truth."""
    logging.disable(logging.WARNING)
    problem = _problems()[setting.problem]
    simulator, times = problem.simulator, _truth(setting.problem)
    best = min(times.values())
    store = Store("sqlite://")
    job = WeatheredJob(
        Tuner(store), simulator, "job", setting.seed, noise=0.0, straggler_probability=0.0
    )
    job.weather = Weather(setting.climate, setting.seed)
    job.disturbed = job.weather.factor
    job.run(MOST_STEPS, until_finished=True)
    result = job.status.result
    assert result is not None, problem.name
    steps = job.switches[-1].step - job.switches[0].step
    kept = job.true_seconds(job.configuration)
    baseline = job.true_seconds(job.baseline)
    trials = [
        {
            "purpose": trial.purpose,
            "configuration": dict(trial.configuration),
            "steps": trial.estimate.count if trial.estimate else 0,
            "over_best": job.true_seconds(trial.configuration) / best - 1,
        }
        for trial in store.trials("job")
    ]
    store.close()
    return {
        "problem": problem.name,
        "climate": setting.climate.name,
        "seed": setting.seed,
        "kept": result.kept,
        "reason": result.reason,
        "speedup": result.speedup,
        "low": result.low,
        "high": result.high,
        "true_speedup": baseline / kept,
        "possible_speedup": baseline / best,
        "is_in_interval": result.low <= baseline / kept <= result.high,
        "is_slower": kept > baseline * (1 + SLOWER),
        "steps": steps,
        "lost_steps": job.lost_steps,
        "trials": trials,
        "regret": kept / best - 1,
    }


def run(tunings: int, jobs: int) -> list[Row]:
    """So many in each climate, the problems in turns; in so many processes."""
    count = len(_problems())
    settings = [
        Setting(number % count, climate, number)
        for number in range(tunings)
        for climate in CLIMATES
    ]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        return list(pool.imap_unordered(tune, settings, chunksize=len(CLIMATES)))


def figures(rows: Sequence[Row]) -> dict[str, str]:
    """Of one climate, or of all."""
    winners = [row for row in rows if row["kept"] == "winner"]
    regrets = [row["regret"] for row in rows]
    return {
        "tunings": str(len(rows)),
        f"kept, slower than the default by over {SLOWER:.1%}": _share(rows, "is_slower"),
        "claimed intervals that hold the truth": _share(winners, "is_in_interval"),
        "winners": str(len(winners)),
        "steps, median (95th)": f"{median(r['steps'] for r in rows):.0f} "
        f"({_percentile([r['steps'] for r in rows], 0.95):.0f})",
        "steps lost, median (95th)": f"{median(r['lost_steps'] for r in rows):.1f} "
        f"({_percentile([r['lost_steps'] for r in rows], 0.95):.1f})",
        "regret: median, mean, 95th": f"{median(regrets):.1%}, {fmean(regrets):.1%}, "
        f"{_percentile(regrets, 0.95):.1%}",
    }


def _share(rows: Sequence[Row], key: str) -> str:
    return f"{fmean(bool(row[key]) for row in rows):.1%}" if rows else "none"


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]

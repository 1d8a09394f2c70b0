"""Tunings by the real tuner in each climate."""

from __future__ import annotations

import logging
import multiprocessing
from dataclasses import dataclass

from bagua_autotune.store import Store
from bagua_autotune.tuning.tuner import Tuner
from benchmarks.support.noise.jobs import (
    MOST_STEPS,
    SLOWER,
    Row,
    WeatheredJob,
    case_of,
    ended,
    truth_of,
)
from benchmarks.support.noise.rivals import RIVALS, Road
from benchmarks.support.noise.unseen import cases
from benchmarks.support.noise.weather import CLIMATES, Climate


@dataclass(frozen=True)
class Setting:
    """One tuning.

    Attributes:
        problem: the place in the list of cases, or of what ``draw`` draws.
        seed: the weather's, and the job's.
        draw: the seed of the drawn jobs; None: a case of the fixed list.
        rivals: names of other searches that get as many steps.
    """

    problem: int
    climate: Climate
    seed: int
    draw: int | None = None
    rivals: tuple[str, ...] = ()


def tune(setting: Setting) -> Row:
    """Tune one job; how it ended, beside the truth."""
    logging.disable(logging.WARNING)
    case, times = case_of(setting.draw, setting.problem), truth_of(setting.draw, setting.problem)
    store = Store("sqlite://")
    job = WeatheredJob.make(Tuner(store), case.simulator, setting.climate, setting.seed)
    job.run(MOST_STEPS, until_finished=True)
    row = ended(job, times)
    trials = [
        {
            "purpose": trial.purpose,
            "configuration": dict(trial.configuration),
            "steps": trial.estimate.count if trial.estimate else 0,
            "over_best": job.true_seconds(trial.configuration) / row["best_seconds"] - 1,
        }
        for trial in store.trials("job")
    ]
    store.close()
    named = {"problem": case.name, "truth": case.kind, "climate": setting.climate.name}
    rivals = {name: _rival(name, setting, row) for name in setting.rivals}
    return {**named, "seed": setting.seed, **row, "trials": trials, "rivals": rivals}


def _rival(name: str, setting: Setting, ours: Row) -> Row:
    """Where a rival leaves the job after as many steps as ours took."""
    simulator = case_of(setting.draw, setting.problem).simulator
    road = Road(simulator, setting.climate, setting.seed, ours["steps"])
    kept = simulator.step_seconds(RIVALS[name](road, setting.seed))
    return {
        "kept_seconds": kept,
        "regret": kept / ours["best_seconds"] - 1,
        "is_slower": kept > ours["baseline_seconds"] * (1 + SLOWER),
    }


def settings(tunings: int, draw: int, rivals: tuple[str, ...] = ()) -> list[Setting]:
    """So many in each climate; every second job is drawn, the others are of the fixed list in turn.

    A job meets all climates one after the other, so that its truth is worked out once.
    """
    fixed = len(cases())
    return [
        Setting(number // 2, climate, number, draw, rivals)
        if number % 2
        else Setting(number // 2 % fixed, climate, number, rivals=rivals)
        for number in range(tunings)
        for climate in CLIMATES
    ]


def run(tunings: int, processes: int, draw: int, rivals: tuple[str, ...] = ()) -> list[Row]:
    """All settings, in so many processes; in the order of the settings."""
    every = settings(tunings, draw, rivals)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return list(pool.imap(tune, every, chunksize=len(CLIMATES)))

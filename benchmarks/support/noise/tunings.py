"""Tunings by the real tuner in each climate."""

from __future__ import annotations

import logging
import multiprocessing
from dataclasses import dataclass

from bagua_autotune.store import Store
from bagua_autotune.tuning.tuner import Tuner
from benchmarks.support.noise.jobs import MOST_STEPS, Row, WeatheredJob, case_of, ended, truth_of
from benchmarks.support.noise.unseen import cases
from benchmarks.support.noise.weather import CLIMATES, Climate


@dataclass(frozen=True)
class Setting:
    """One tuning.

    Attributes:
        problem: the place in the list of cases, or of what ``draw`` draws.
        seed: the weather's, and the job's.
        draw: the seed of the drawn jobs; None: a case of the fixed list.
    """

    problem: int
    climate: Climate
    seed: int
    draw: int | None = None


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
    return {**named, "seed": setting.seed, **row, "trials": trials}


def settings(tunings: int, draw: int) -> list[Setting]:
    """So many in each climate; every second job is drawn, the others are of the fixed list in turn.

    A job meets all climates one after the other, so that its truth is worked out once.
    """
    fixed = len(cases())
    return [
        Setting(number // 2, climate, number, draw)
        if number % 2
        else Setting(number // 2 % fixed, climate, number)
        for number in range(tunings)
        for climate in CLIMATES
    ]


def run(tunings: int, processes: int, draw: int) -> list[Row]:
    """All settings, in so many processes; in the order of the settings."""
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return list(pool.imap(tune, settings(tunings, draw), chunksize=len(CLIMATES)))

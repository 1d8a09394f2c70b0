"""Is the best level of a knob found if the link had a bad moment at the only visit to it?

As on two machines over TCP: VGG16's one visit to 8 channels took 116 to 128 ms a step, else 60, and
8 channels were never visited again.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count, islice
from multiprocessing.pool import Pool

import numpy as np

from bagua_autotune.model.knobs import Configuration, Value
from bagua_autotune.store import Store
from bagua_autotune.tuning.tuner import Tuner
from bagua_simulator import Simulator
from benchmarks.support.noise.jobs import MOST_STEPS, Row, WeatheredJob, case_of, ended, truth_of
from benchmarks.support.noise.odd import with_slower_links
from benchmarks.support.noise.weather import Climate

# A level matters if every other one is slower by so much, whatever else is set.
MATTERS = 0.05
KNOBS = ("channels", "hierarchical")
BAD_FACTORS = (1.6, 2.0)
RUNS_OF_A_JOB, DRAWN_AT_ONCE = 4, 32
# Noise as is usual; the bad moment comes on top of it.
CLIMATE = Climate("2 % by visit", by_visit=0.02)
# A link may be this many times slower in its bad moment, at most.
SLOWEST = 1e4


@dataclass(frozen=True)
class Level:
    """A value of a knob, not the default's, that the best configuration has and needs."""

    knob: str
    value: Value
    second_over_best: float


@dataclass(frozen=True)
class Setting:
    """One tuning of the drawn job of this number.

    ``has_control``: it is tuned a second time, without the bad moment.
    """

    draw: int
    number: int
    level: Level
    seed: int
    has_control: bool = False


class BadMomentJob(WeatheredJob):
    """The link is slow during the whole first visit to any configuration with the level, then never
    again. Computing is not slower."""

    level: Level
    has_bad_moment = True
    visits = 0
    _slow: Simulator | None = None

    @property
    def now(self) -> Simulator:
        assert isinstance(self.simulator, Simulator)
        return self._slow or self.simulator

    def _new_visit(self) -> None:
        super()._new_visit()
        self._slow = None
        # What is run after the tuning is no visit.
        if self._trial is not None and self.configuration[self.level.knob] == self.level.value:
            self.visits += 1
            if self.visits == 1 and self.has_bad_moment:
                factor = np.random.default_rng((self.seed, 8)).uniform(*BAD_FACTORS)
                self._slow = slower(self.now, self.configuration, factor)


def slower(simulator: Simulator, configuration: Configuration, factor: float) -> Simulator:
    """The same job while its links are so slow that steps take ``factor`` as long."""
    wanted = factor * simulator.step_seconds(configuration)
    low, high = 0.0, math.log(SLOWEST)
    while high - low > 1e-3:
        middle = (low + high) / 2
        is_enough = (
            with_slower_links(simulator, math.exp(middle)).step_seconds(configuration) >= wanted
        )
        low, high = (low, middle) if is_enough else (middle, high)
    return with_slower_links(simulator, math.exp(high))


def level_that_matters(times: Mapping[Configuration, float]) -> Level | None:
    """Of the job whose candidates, the default first, take so long; None if no level does."""
    default, best = next(iter(times)), min(times, key=times.__getitem__)
    for knob in KNOBS:
        others = [seconds for found, seconds in times.items() if found[knob] != best[knob]]
        over_best = min(others, default=times[best]) / times[best] - 1
        if over_best >= MATTERS and best[knob] != default[knob]:
            return Level(knob, best[knob], over_best)
    return None


def tune(setting: Setting) -> Row:
    """Tune one job; how it ended, beside the truth."""
    logging.disable(logging.WARNING)
    case = case_of(setting.draw, setting.number)
    return {
        "problem": case.name,
        "truth": case.kind,
        "seed": setting.seed,
        "level": f"{setting.level.knob} {setting.level.value}",
        "second_over_best": setting.level.second_over_best,
        **_tuned(setting, has_bad_moment=True),
        "control": _tuned(setting, has_bad_moment=False) if setting.has_control else None,
    }


def _tuned(setting: Setting, has_bad_moment: bool) -> Row:
    case = case_of(setting.draw, setting.number)
    store = Store("sqlite://")
    job = BadMomentJob.make(Tuner(store), case.simulator, CLIMATE, setting.seed)
    job.level, job.has_bad_moment = setting.level, has_bad_moment
    job.run(MOST_STEPS, until_finished=True)
    row = ended(job, truth_of(setting.draw, setting.number))
    store.close()
    has_level = job.configuration[setting.level.knob] == setting.level.value
    return {**row, "visits": job.visits, "has_level": has_level}


def settings(runs: int, draw: int, pool: Pool) -> Iterator[Setting]:
    """So many tunings of the first drawn jobs that have a level that matters, 4 of each."""
    left = math.ceil(runs / RUNS_OF_A_JOB)
    for start in count(0, DRAWN_AT_ONCE):
        numbers = range(start, start + DRAWN_AT_ONCE)
        levels = pool.starmap(_level_of, [(draw, number) for number in numbers])
        for number, level in zip(numbers, levels, strict=True):
            if level is not None and left > 0:
                left -= 1
                for seed in range(RUNS_OF_A_JOB):
                    yield Setting(draw, number, level, seed)
        if not left:
            return


def _level_of(draw: int, number: int) -> Level | None:
    return level_that_matters(truth_of(draw, number))


def run(runs: int, processes: int, draw: int, has_control: bool = False) -> list[Row]:
    """So many tunings, in so many processes; with the same without the bad moment, if asked for."""
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        every = islice(settings(runs, draw, pool), runs)
        first = [replace(setting, has_control=has_control) for setting in every]
        return pool.map(tune, first, chunksize=RUNS_OF_A_JOB)

"""Is the best level of a knob kept if steps were slow at the only visit to it, as its link was?

As on two machines over TCP: VGG16's one visit to 8 channels took 116 to 128 ms a step, else 60.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from multiprocessing.pool import Pool
from statistics import fmean

import numpy as np

from bagua_autotune.search.searcher import USUAL
from bagua_autotune.store import Store
from bagua_autotune.tuning.tuner import Tuner
from bagua_simulator import Simulator
from bagua_wire.configuration import Configuration, Value
from benchmarks.support.harness import print_table
from benchmarks.support.noise.tunings import (
    MOST_STEPS,
    Figures,
    Row,
    WeatheredJob,
    case_of,
    ended,
    figures,
    truth_of,
)
from benchmarks.support.noise.weather import Climate

# A level matters if every other one is slower by so much, whatever else is set.
MATTERS = 0.05
KNOBS = ("channels", "hierarchical")
BAD_FACTORS = (1.6, 2.0)
TUNINGS_OF_A_JOB, DRAWN_AT_ONCE = 4, 32
CLIMATE = Climate("2 % by visit", by_visit=0.02)
"""The usual noise, beside the bad moment."""
SLOWEST = 1e4
"""So many times slower a link may be in its bad moment."""


@dataclass(frozen=True)
class Setting:
    """One tuning of a drawn job, whose best needs a ``value`` of a ``knob``, not the default's."""

    draw: int
    number: int
    knob: str
    value: Value
    seed: int
    searcher: str = USUAL
    has_bad_moment: bool = True


class BadMomentJob(WeatheredJob):
    """The link is slow during the whole first visit to any configuration with the value, then never
    again. Computing is not slower."""

    setting: Setting
    usual: Simulator
    visits = 0

    def _switch(self) -> None:
        before = len(self.switches)
        super()._switch()
        if len(self.switches) == before:
            return
        self.simulator = self.usual
        # What is run after the tuning is no visit.
        if self._trial is not None and self.configuration[self.setting.knob] == self.setting.value:
            self.visits += 1
            if self.visits == 1 and self.setting.has_bad_moment:
                factor = np.random.default_rng((self.seed, 8)).uniform(*BAD_FACTORS)
                self.simulator = slower(self.usual, self.configuration, factor)


def slower(simulator: Simulator, configuration: Configuration, factor: float) -> Simulator:
    """The same job while its links are so slow that its steps take ``factor`` as long."""
    wanted = factor * simulator.step_seconds(configuration)
    low, high = 0.0, math.log(SLOWEST)
    while high - low > 1e-3:
        middle = (low + high) / 2
        is_enough = _on_links(simulator, middle).step_seconds(configuration) >= wanted
        low, high = (low, middle) if is_enough else (middle, high)
    return _on_links(simulator, high)


def _on_links(simulator: Simulator, log_factor: float) -> Simulator:
    """The same job on links slower by a factor, given by its logarithm."""
    cluster, share = simulator.cluster, math.exp(-log_factor)
    rates = ("bandwidth", "flow", "inside_bandwidth")
    names = [f"{rate}_bytes_per_second" for rate in rates]
    return simulator.on(replace(cluster, **{n: share * getattr(cluster, n) for n in names}))


def level_that_matters(times: Mapping[Configuration, float]) -> tuple[str, Value] | None:
    """Of the job whose candidates, the default first, take so long; None if no level does."""
    default, best = next(iter(times)), min(times, key=times.__getitem__)
    for knob in KNOBS:
        others = [seconds for found, seconds in times.items() if found[knob] != best[knob]]
        over_best = min(others, default=times[best]) / times[best] - 1
        if over_best >= MATTERS and best[knob] != default[knob]:
            return knob, best[knob]
    return None


def tune(setting: Setting) -> Row:
    """Tune one job; how it ended, beside the truth."""
    logging.disable(logging.WARNING)
    case = case_of(setting.draw, setting.number)
    store = Store("sqlite://")
    job = BadMomentJob.make(
        Tuner(store, searcher=setting.searcher), case.simulator, CLIMATE, setting.seed
    )
    job.setting, job.usual = setting, case.simulator
    job.run(MOST_STEPS, until_finished=True)
    job.simulator = job.usual
    row = ended(job, truth_of(setting.draw, setting.number))
    store.close()
    kept_level = job.configuration[setting.knob] == setting.value
    named = {"problem": case.name, "seed": setting.seed, "has_bad_moment": setting.has_bad_moment}
    return {**named, **row, "visits": job.visits, "kept_level": kept_level}


def _settings(draw: int, pool: Pool, searcher: str) -> Iterator[Setting]:
    for start in count(0, DRAWN_AT_ONCE):
        numbers = range(start, start + DRAWN_AT_ONCE)
        levels = pool.starmap(_level_of, [(draw, number) for number in numbers])
        for number, level in zip(numbers, levels, strict=True):
            for seed in range(TUNINGS_OF_A_JOB) if level else ():
                yield Setting(draw, number, *level, seed, searcher)


def _level_of(draw: int, number: int) -> tuple[str, Value] | None:
    return level_that_matters(truth_of(draw, number))


def run(tunings: int, processes: int, draw: int, searcher: str = USUAL) -> list[Row]:
    """So many tunings of the first drawn jobs that have a level that matters, 4 of each, with the
    bad moment and without."""
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        every = list(islice(_settings(draw, pool, searcher), tunings))
        every += [replace(each, has_bad_moment=False) for each in every]
        return pool.map(tune, every, chunksize=TUNINGS_OF_A_JOB)


def show(rows: Sequence[Row]) -> dict[str, Figures]:
    """Print a table of both; all lines."""
    lines = {}
    for name, is_bad in (("bad moment", True), ("none", False)):
        own = [row for row in rows if row["has_bad_moment"] == is_bad]
        kept = {"keep the level": f"{fmean(row['kept_level'] for row in own):.1%}"}
        again = {"visit it again": f"{fmean(row['visits'] > 1 for row in own):.0%}"}
        lines[name] = kept | again | figures(own)
    columns = list(lines["none"])
    print()
    print_table(
        ("at the first visit", *columns), [(n, *(o[c] for c in columns)) for n, o in lines.items()]
    )
    return lines

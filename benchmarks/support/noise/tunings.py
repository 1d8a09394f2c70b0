"""Tunings by the real tuner in each climate, and what is said of one when it has ended."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from typing_extensions import Self

from bagua_autotune.search.searcher import USUAL
from bagua_autotune.store import Store
from bagua_autotune.tuning.tuner import Tuner
from bagua_simulator import Simulator
from bagua_wire.configuration import Configuration
from bagua_wire.profile import Profile
from benchmarks.support.noise.cases import Case, cases, drawn_case
from benchmarks.support.noise.rivals import RIVALS, Road
from benchmarks.support.noise.weather import CLIMATES, Climate, Weather
from tests.autotune.simulated_job import SimulatedJob, truth

MOST_STEPS = 3000
# A job that keeps what is slower than its default by more than this was made worse.
SLOWER = 0.005
Row = Mapping[str, Any]


class WeatheredJob(SimulatedJob):
    """A simulated job whose steps are disturbed by a climate's weather, and by nothing else."""

    weather: Weather
    climate: Climate

    @classmethod
    def make(
        cls,
        tuner: Tuner,
        simulator: Simulator,
        climate: Climate,
        seed: int,
    ) -> Self:
        job = cls(tuner, simulator, "job", seed, 0.0, straggler_probability=0.0)
        job.climate, job.weather = climate, Weather(climate, seed)
        job.disturbed = job.weather.factor
        return job

    def _switch(self) -> None:
        before = self.configuration, self._trial
        super()._switch()
        if before != (self.configuration, self._trial):
            self.weather.new_visit()

    def _profile(self, factor: float) -> Profile:
        """Profiled steps are steps: they are as slow as the weather makes them, and as noisy."""
        noise = self.climate.inside
        exact = self.simulator.profile(self.configuration, self.step, self._generator, noise)
        return stretched(exact, factor)


def stretched(profile: Profile, factor: float) -> Profile:
    """The same with all times ``factor`` as long."""
    buckets = tuple(
        replace(
            bucket,
            started_seconds=factor * bucket.started_seconds,
            ended_seconds=factor * bucket.ended_seconds,
        )
        for bucket in profile.buckets
    )
    ready = tuple(factor * seconds for seconds in profile.ready_seconds)
    return replace(
        profile, step_seconds=factor * profile.step_seconds, ready_seconds=ready, buckets=buckets
    )


_unseen = cache(cases)


@cache
def case_of(draw: int | None, number: int) -> Case:
    """A case of the fixed list, or of those that a seed draws."""
    return _unseen()[number] if draw is None else drawn_case(draw, number)


@cache
def truth_of(draw: int | None, number: int) -> dict[Configuration, float]:
    return truth(case_of(draw, number).simulator)


def ended(job: SimulatedJob, times: Mapping[Configuration, float]) -> Row:
    """How a tuning ended, beside the true times of all candidates."""
    result = job.status.result
    assert result is not None, "the tuning has not ended"
    best, baseline = min(times.values()), job.true_seconds(job.baseline)
    kept = job.true_seconds(job.configuration)
    return {
        "kept": result.kept,
        "reason": result.reason,
        "configuration": dict(job.configuration),
        "speedup": result.speedup,
        "low": result.low,
        "high": result.high,
        "kept_seconds": kept,
        "best_seconds": best,
        "baseline_seconds": baseline,
        "true_speedup": baseline / kept,
        "possible_speedup": baseline / best,
        "is_in_interval": result.low <= baseline / kept <= result.high,
        "is_slower": kept > baseline * (1 + SLOWER),
        "steps": job.switches[-1].step - job.switches[0].step,
        "lost_steps": job.lost_steps,
        "regret": kept / best - 1,
    }


@dataclass(frozen=True)
class Setting:
    """One tuning.

    Attributes:
        problem: the place in the list of cases, or of what ``draw`` draws.
        seed: the weather's, and the job's.
        draw: the seed of the drawn jobs; None: a case of the fixed list.
        rivals: names of other searches that get as many steps.
        searcher: the search method's name; see bagua_autotune.search.
    """

    problem: int
    climate: Climate
    seed: int
    draw: int | None = None
    rivals: tuple[str, ...] = ()
    searcher: str = USUAL


def tune(setting: Setting) -> Row:
    """Tune one job; how it ended, beside the truth."""
    logging.disable(logging.WARNING)
    case, times = case_of(setting.draw, setting.problem), truth_of(setting.draw, setting.problem)
    store = Store("sqlite://")
    tuner = Tuner(store, searcher=setting.searcher)
    job = WeatheredJob.make(tuner, case.simulator, setting.climate, setting.seed)
    job.run(MOST_STEPS, until_finished=True)
    row = ended(job, times)
    trials = [
        {
            "purpose": trial.purpose,
            "configuration": dict(trial.configuration),
            "steps": trial.estimate.count if trial.estimate else 0,
            "over_best": job.true_seconds(trial.configuration) / row["best_seconds"] - 1,
        }
        for trial in store.trials.of("job")
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


def settings(
    tunings: int, draw: int, rivals: tuple[str, ...] = (), searcher: str = USUAL
) -> list[Setting]:
    """So many in each climate; every second job is drawn, the others are of the fixed list in turn.

    A job meets all climates one after the other, so that its truth is worked out once.
    """
    fixed = len(cases())
    return [
        Setting(number // 2, climate, number, draw, rivals, searcher)
        if number % 2
        else Setting(number // 2 % fixed, climate, number, None, rivals, searcher)
        for number in range(tunings)
        for climate in CLIMATES
    ]


def run(
    tunings: int,
    processes: int,
    draw: int,
    rivals: tuple[str, ...] = (),
    searcher: str = USUAL,
) -> list[Row]:
    """All settings, in so many processes; in the order of the settings."""
    every = settings(tunings, draw, rivals, searcher)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return list(pool.imap(tune, every, chunksize=len(CLIMATES)))

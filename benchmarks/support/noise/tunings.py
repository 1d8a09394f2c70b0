"""Tunings by the real tuner in each climate, and what they show, also beside another checkout's: by
climate and kind of truth."""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from typing_extensions import Self

import bagua_autotune
import bagua_simulator
from bagua_autotune.search.searcher import USUAL
from bagua_autotune.store import Store
from bagua_autotune.tuning.tuner import Tuner
from bagua_simulator import Simulator
from bagua_wire.configuration import Configuration
from bagua_wire.profile import Profile
from benchmarks.support.harness import print_table
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
    def make(cls, tuner: Tuner, simulator: Simulator, climate: Climate, seed: int) -> Self:
        job = cls(tuner, simulator, "job", seed, 0.0, straggler_probability=0.0)
        job.climate, job.weather = climate, Weather(climate, seed)
        job.disturbed = job._disturbance
        return job

    def _disturbance(self, step: int) -> float:
        return self.weather.factor(step, self.configuration.number("channels"))

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
    tunings: int, processes: int, draw: int, rivals: tuple[str, ...] = (), searcher: str = USUAL
) -> list[Row]:
    """All settings, in so many processes; in the order of the settings."""
    every = settings(tunings, draw, rivals, searcher)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return list(pool.imap(tune, every, chunksize=len(CLIMATES)))


ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "benchmarks" / "tuning.py"
ALL = "all of them"
NAME_OF_SLOWER = f"{SLOWER:.1%} slower than default"
NAME_OF_REGRET = "regret: mean, median, 95th"
Figures = Mapping[str, str]


def figures(rows: Sequence[Row]) -> Figures:
    """Of tunings in weather."""
    winners = [row for row in rows if row["kept"] == "winner"]
    regrets = [row["regret"] for row in rows]
    return {
        "tunings": str(len(rows)),
        NAME_OF_SLOWER: _share(rows, "is_slower"),
        "claims that hold": f"{_share(winners, 'is_in_interval')} of {len(winners)}",
        "steps: median, 95th": _typical(rows, "steps", ".0f"),
        "lost: median, 95th": _typical(rows, "lost_steps", ".1f"),
        NAME_OF_REGRET: f"{fmean(regrets):.1%}, {median(regrets):.1%}, "
        f"{percentile(regrets, 0.95):.1%}",
        "within 2 %": f"{fmean(regret <= 0.02 for regret in regrets):.0%}",
        "within 5 %": f"{fmean(regret <= 0.05 for regret in regrets):.0%}",
    }


def grouped(rows: Sequence[Row], key: str) -> dict[str, list[Row]]:
    """By what stands under the key, in the order in which that first occurs; then all."""
    names = dict.fromkeys(row[key] for row in rows)
    found = {name: [row for row in rows if row[key] == name] for name in names}
    return {**found, ALL: list(rows)} if rows else {}


def of_noise(rows: Sequence[Row]) -> dict[str, Figures]:
    """By climate, of all, and by kind of truth."""
    found = {name: figures(own) for name, own in grouped(rows, "climate").items()}
    kinds = grouped(rows, "truth")
    return found | {kind: figures(kinds[kind]) for kind in sorted(kinds) if kind != ALL}


def of_searches(rows: Sequence[Row], others: Sequence[Row]) -> dict[str, Figures]:
    """Ours, that of the other checkout, and the rivals, after the same steps as ours."""
    searches = {"ours": list(rows)}
    if others:
        searches["ours, beside"] = list(others)
    for name in rows[0]["rivals"]:
        searches[name] = [{**row, **row["rivals"][name]} for row in rows]
    return {name: _of_search(own) for name, own in searches.items()}


def _of_search(rows: Sequence[Row]) -> Figures:
    found = figures(rows)
    asked = ("tunings", NAME_OF_REGRET, NAME_OF_SLOWER, "within 2 %", "within 5 %")
    kinds = {name: own for name, own in sorted(grouped(rows, "truth").items()) if name != ALL}
    return {name: found[name] for name in asked} | {
        f"2 %: {kind}": f"{fmean(row['regret'] <= 0.02 for row in own):.0%}"
        for kind, own in kinds.items()
    }


def show(rows: Sequence[Row], others: Sequence[Row]) -> dict[str, Figures]:
    """Print a table, what ran beside each line below it, and one of the searches; all lines."""
    besides: Sequence[Row] = ()
    if others:
        rows, besides = joined(rows, others)
    lines = dict(of_noise(rows))
    if besides:
        beside = of_noise(besides)
        lines = {
            key: own
            for name in lines
            for key, own in ((name, lines[name]), (f"  {name}, beside", beside[name]))
        }
    _print("noise", lines)
    if besides:
        print(f"noise: against what ran beside it, on average: {difference(rows, besides)}")
    shown = {f"noise: {name.strip()}": own for name, own in lines.items()}
    if rows[0]["rivals"] or besides:
        searches = of_searches(rows, besides)
        _print("search", searches)
        shown |= {f"search: {name}": own for name, own in searches.items()}
    return shown


def _print(title: str, lines: Mapping[str, Figures]) -> None:
    columns = list(next(iter(lines.values())))
    print()
    print_table((title, *columns), [(n, *(own[c] for c in columns)) for n, own in lines.items()])


def difference(rows: Sequence[Row], besides: Sequence[Row]) -> str:
    """Of ours to what ran beside it, tuning by tuning, with two standard errors."""
    told = []
    for key, scale, unit in (("regret", 100, " %"), ("steps", 1, "")):
        pairs = zip(rows, besides, strict=True)
        apart = [scale * (row[key] - other[key]) for row, other in pairs]
        error = 2 * stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else math.inf
        told.append(f"{key} {fmean(apart):+.1f}{unit} (±{error:.1f})")
    return ", ".join(told)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def _typical(rows: Sequence[Row], key: str, form: str) -> str:
    values = [row[key] for row in rows]
    return f"{median(values):{form}}, {percentile(values, 0.95):{form}}"


def _share(rows: Sequence[Row], key: str) -> str:
    return f"{fmean(bool(row[key]) for row in rows):.1%}" if rows else "none"


def source_root() -> Path:
    """The checkout whose service this process runs."""
    return Path(bagua_autotune.__file__).resolve().parents[2]


def rows_of(checkout: Path, arguments: Sequence[str]) -> dict[str, list[Row]]:
    """By part, of ``benchmarks/tuning.py`` with these arguments, by the checkout's service;
    the benchmark and the simulator are those of this process.

    Raises:
        RuntimeError: it failed, or ran another service than that of the checkout.
    """
    with tempfile.TemporaryDirectory() as folder:
        # The truth must be the same, whatever simulator the checkout has.
        (Path(folder) / "bagua_simulator").symlink_to(Path(bagua_simulator.__file__).parent)
        paths = (Path(folder), checkout / "autotune", checkout / "client", ROOT)
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(str(p.resolve()) for p in paths)}
        written = Path(folder) / "beside.json"
        command = [sys.executable, str(SCRIPT), *arguments, "--json", str(written)]
        if subprocess.run(command, env=variables, stdout=subprocess.DEVNULL).returncode:
            raise RuntimeError(f"the tunings of {checkout} failed")
        found = json.loads(written.read_text())
    if Path(found["service"]) != checkout.resolve():
        raise RuntimeError(f"the service of {found['service']} ran in place of that of {checkout}")
    parts: dict[str, list[Row]] = found["parts"]
    return parts


def joined(rows: Sequence[Row], others: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Both with the regret against the best of what either may choose.

    Raises:
        ValueError: they are not of the same jobs.
    """
    mine: list[Row] = []
    theirs: list[Row] = []
    for row, other in zip(rows, others, strict=True):
        for key in ("problem", "seed", "baseline_seconds"):
            if row[key] != other[key]:
                raise ValueError(f"{key}: {row[key]} beside {other[key]}; not the same job")
        best = min(row["best_seconds"], other["best_seconds"])
        mine.append({**row, "regret": row["kept_seconds"] / best - 1})
        theirs.append({**other, "regret": other["kept_seconds"] / best - 1})
    return mine, theirs

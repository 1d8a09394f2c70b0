"""One search of one engine on one simulated job, and what many of them show."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, median

import numpy as np

from benchmarks.support.searches.engines import ENGINES
from benchmarks.support.searches.landscape import load

TOLERANCES = (0.05, 0.02, 0.01)


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

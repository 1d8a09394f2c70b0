"""Jobs that are formulas, without any process, and searches of them that are kept in a store."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bagua_autotune.model.job import Limits
from bagua_autotune.store import Store
from bagua_runs.job import Interrupted
from bagua_runs.outcomes import BASELINE, Outcome, Run
from bagua_runs.presets import BUFFERS, find_variables
from bagua_runs.record import About, Record
from bagua_runs.search import SystemSearch, Verdict
from bagua_runs.space import CHANNELS, SOCKETS, THREADS, SearchSpace, Setting
from tests.autotune.support import Clock

NOISE = 0.05
MIB = 2**20
BEST_SPEED = 100.0


def speed(environment: Mapping[str, str]) -> float:
    """Of a job on a link that 8 connections fill: one takes twice as long as its best.

    More connections than that, more channels than it takes, and small buffers cost a little.
    """

    def exponent(name: str, otherwise: int) -> float:
        return math.log2(int(environment.get(name, otherwise)))

    connections = exponent(THREADS, 1) + exponent(SOCKETS, 1) + exponent(CHANNELS, 1)
    lacking, spare = max(3 - connections, 0.0), max(connections - 3, 0.0)
    seconds = (
        1.0
        + 0.11 * lacking**2
        + 0.015 * spare**2
        + 0.01 * max(22 - exponent(BUFFERS.name, 4 * MIB), 0.0) ** 2
        + 0.02 * max(2 - exponent("NCCL_MIN_NCHANNELS", 1), 0.0)
    )
    return BEST_SPEED / seconds


class PlantedJob:
    """Crashes with the largest buffers, and hangs with the most threads and sockets."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.environments: list[Mapping[str, str]] = []

    def __call__(self, environment: Mapping[str, str], timeout_seconds: float) -> Outcome:
        self.environments.append(environment)
        if environment.get(BUFFERS.name) == str(16 * MIB):
            return Outcome(failure="ended with exit code 1", seconds=5.0)
        if environment.get(THREADS) == "8" and environment.get(SOCKETS) == "8":
            return Outcome(failure="no result", seconds=timeout_seconds)
        score = speed(environment) * math.exp(self._random.gauss(0.0, NOISE))
        return Outcome(score, -math.log(score), seconds=20.0)


FACTS = {"backend": "nccl", "has_client": True, "ranks": 2, "device": "cuda"}


def settings() -> list[Setting]:
    return find_variables("nccl", has_channels=True, environment={})


@dataclass
class Job:
    """A job whose noise depends on its settings alone.

    Attributes:
        clock: passes by ``run_seconds`` in each run.
        left: it is interrupted in the run behind so many.
        fails: with some settings.
        meanwhile: what happens in the run behind so many.
    """

    clock: Clock
    left: float = math.inf
    run_seconds: float = 20.0
    fails: bool = True
    made: list[tuple[tuple[str, str], ...]] = field(default_factory=list)
    meanwhile: dict[int, Callable[[], None]] = field(default_factory=dict)

    def __call__(self, changes: Mapping[str, str], timeout_seconds: float) -> Outcome:
        if len(self.made) in self.meanwhile:
            self.meanwhile.pop(len(self.made))()
        self.clock.now += self.run_seconds
        if self.left <= 0:
            raise Interrupted
        self.left -= 1
        self.made.append(tuple(sorted(changes.items())))
        if self.fails and changes.get(THREADS) == "8":
            return Outcome(failure="ran out of memory: here", is_out_of_memory=True)
        if self.fails and changes.get("NCCL_BUFFSIZE") == "1048576":
            return Outcome(failure="ended with exit code 1")
        noise = random.Random(str(self.made[-1])).gauss(0.0, 0.03)
        score = speed(changes) * math.exp(noise)
        return Outcome(score, -math.log(score), seconds=self.run_seconds)


@dataclass
class Searching:
    """One search, which may be made in several parts."""

    store: Store | None
    has_seconds: bool = False
    most_seconds: float = math.inf
    most_runs: int = 12
    fails: bool = True
    fingerprint: str = "f" * 64
    clock: Clock = field(default_factory=Clock)
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.job = Job(self.clock, fails=self.fails)

    def part(self, runs: float = math.inf) -> tuple[SystemSearch, Verdict, Record]:
        """Search from where it was; raises Interrupted in the run behind so many."""
        self.job.left = runs
        limits = Limits(max_samples=self.most_runs)
        about = About("train.py", self.fingerprint, limits, self.has_seconds)
        record = Record(self.store, about, self.said.append, self.clock)
        known = record.resume()
        space = SearchSpace(settings())
        first = None if known else self.job({}, 300.0)
        record.begin(space, known or FACTS)
        outcome = record.recalled(1, BASELINE, space.settings_of(space.own))
        if outcome is None:
            outcome = first or self.job({}, 300.0)
            record.ends(1, outcome)
        own = Run(1, BASELINE, space.own, outcome)
        self.search = SystemSearch(
            space,
            self.job,
            self.most_runs,
            runs=(own,),
            record=record,
            most_seconds=self.most_seconds,
        )
        return self.search, self.search.find(), record

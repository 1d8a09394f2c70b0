"""Jobs to register and simulated ranks that run them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy import event, select
from sqlalchemy.pool import Pool

from bagua_autotune.measuring.visits import Visits
from bagua_autotune.model.job import Job, JobSpec, Observation
from bagua_autotune.store import Store
from bagua_autotune.store.engine.tables import JobRow
from bagua_autotune.store.jobs import read_each
from bagua_autotune.tuning.status import JobState
from bagua_autotune.tuning.tuner import Tuner
from bagua_wire.configuration import Value

MIB = 1024**2
T = TypeVar("T")


def present(value: T | None) -> T:
    """What must be there."""
    assert value is not None
    return value


def registration(**changes: Any) -> dict[str, Any]:
    """The body of a PUT: 250 tensors of 400 kB, 2 nodes x 2 ranks."""
    tensors = [
        {
            "name": f"layer{index}.weight",
            "elements": 100_000,
            "bytes": 400_000,
            "dtype": "torch.float32",
            "group": "torch.float32/cpu",
        }
        for index in range(250)
    ]
    body: dict[str, Any] = {
        "name": "digits",
        "world_size": 4,
        "ranks_per_node": [2, 2],
        "tensors": tensors,
        "knobs": {
            "bucket_bytes": {"type": "log_integer", "low": 65536, "high": 1024 * MIB},
            "hierarchical": {"type": "categorical", "values": ["off", "leaders"]},
        },
        "default_configuration": {"bucket_bytes": 25 * MIB, "hierarchical": "off"},
        "fingerprint": "f" * 64,
    }
    return {**body, **changes}


def make_spec(**changes: Any) -> JobSpec:
    import json

    return JobSpec.model_validate_json(json.dumps(registration(**changes)))


def known_visits(visit_error: float, step_spread: float) -> Visits:
    """Visits and their steps differ by so much."""
    found = Visits([])
    found.visit_error, found.step_spread = visit_error, step_spread
    return found


def peaked(configuration: Mapping[str, Value], best_bytes: float = 4 * MIB) -> float:
    """Step seconds that are lowest at ``best_bytes``, hierarchical: 1.17x over 25 MiB flat."""
    distance = math.log2(int(configuration["bucket_bytes"]) / best_bytes)
    return 0.2 * (1 + 0.02 * distance**2) * (0.93 if configuration["hierarchical"] != "off" else 1)


class Ranks:
    """Simulated ranks of one job: they run what they are told and report noisy step times."""

    def __init__(
        self,
        seed: int = 0,
        noise: float = 0.05,
        step_seconds: Callable[[Mapping[str, Value]], float] = peaked,
        world_size: int = 4,
    ) -> None:
        self._random = random.Random(seed)
        self._noise = noise
        self._step_seconds = step_seconds
        self._world_size = world_size
        self.step = 0

    def run(self, configuration: Mapping[str, Value], steps: int) -> list[tuple[int, list[float]]]:
        """So many steps: pairs of step number and seconds by rank."""
        found = []
        for _ in range(steps):
            self.step += 1
            # What slows a step mostly slows all ranks; the slowest decides.
            common = self._step_seconds(configuration) * math.exp(
                self._random.gauss(0, self._noise)
            )
            seconds = [common * self._random.uniform(0.99, 1) for _ in range(self._world_size)]
            found.append((self.step, seconds))
        return found


def drive(
    tuner: Tuner,
    job_id: str,
    ranks: Ranks,
    polls: int = 100_000,
    steps: int = 4,
    until_trial: int = 1000,
) -> JobState:
    """Let the ranks run what they are told until that trial, or until tuning ends."""
    for _ in range(polls):
        trial = tuner.open_trial(job_id)
        if trial is None or trial.index >= until_trial:
            break
        made = ranks.run(trial.configuration, steps)
        told = [Observation(step, tuple(seconds)) for step, seconds in made]
        tuner.observe(job_id, trial.index, told)
    return tuner.status(job_id)


class Clock:
    """Time that passes when told to, and by ``step`` with each look."""

    def __init__(self, now: float = 1_000_000.0, step: float = 1.0) -> None:
        self.now, self._step = now, step

    def __call__(self) -> float:
        self.now += self._step
        return self.now


class Later:
    """Decisions are made when the test says so."""

    def __init__(self) -> None:
        self.waiting: dict[str, Callable[[], object]] = {}

    def start(self, key: str, work: Callable[[], object]) -> None:
        self.waiting.setdefault(key, work)

    def is_busy(self, key: str) -> bool:
        return key in self.waiting

    def finish(self) -> None:
        waiting, self.waiting = self.waiting, {}
        for work in waiting.values():
            work()


def stored_jobs(store: Store) -> list[Job]:
    """All that can be read, newest first, those of earlier lives among them."""
    query = select(JobRow.id).order_by(JobRow.created_at.desc(), JobRow.id)
    return list(read_each(store.database.read(query), lambda row: store.jobs.get(row.id)))


@contextmanager
def counting() -> Iterator[list[str]]:
    """The statements that SQLite runs in the block, what begins and ends transactions among
    them."""
    found: list[str] = []

    def lent(connection: Any, _record: Any, _proxy: Any) -> None:
        connection.set_trace_callback(found.append)

    def returned(connection: Any, _record: Any) -> None:
        connection.set_trace_callback(None)

    event.listen(Pool, "checkout", lent)
    event.listen(Pool, "checkin", returned)
    try:
        yield found
    finally:
        event.remove(Pool, "checkout", lent)
        event.remove(Pool, "checkin", returned)

"""A store full of jobs as real ones leave it: tensors, trials, observations, profiles, events.

Two jobs are made through the store itself, one that is still tuned and one that is done; the
others are copies of their rows, which takes seconds and not hours.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from functools import cache

import numpy as np
from sqlalchemy import Connection, text

from bagua_autotune.measuring.objective import StepTime
from bagua_autotune.model.job import Event, JobSpec, Observation, Result, Trial
from bagua_autotune.model.knobs import Categorical, Configuration, Value
from bagua_autotune.model.statistics import Estimate, estimate
from bagua_autotune.store import Step, Store
from bagua_simulator import Cluster, Simulator
from bagua_simulator.workloads import load

STEPS = 10  # observed under each trial
PROFILES = 3  # of each of the first trials
PROFILED_TRIALS = 6
NOISE = 0.03
DAY_SECONDS = 86_400.0


@dataclass(frozen=True)
class Filling:
    """What to put into a store."""

    jobs: int
    active: int
    trials: int


def fill(store: Store, filling: Filling) -> list[str]:
    """Fill an empty store; the ids of the active jobs, which are all being tuned.

    The others were tuned days ago and have ended.
    """
    now = time.time()
    active = [f"active-{number:04}" for number in range(filling.active)]
    done = [f"done-{number:04}" for number in range(filling.jobs - filling.active)]
    for ids, at in ((active, now), (done, now - 3 * DAY_SECONDS)):
        if not ids:
            continue
        _make(store, ids[0], filling.trials, at, is_done=ids is done)
        with store.database.writing() as session:
            for place, job_id in enumerate(ids[1:], start=1):
                _copy(session.connection(), ids[0], job_id, place)
    return active


def _make(store: Store, job_id: str, trials: int, at: float, *, is_done: bool) -> None:
    """A job of 8 ranks whose last trial was just proposed, or that has a result and ended."""
    simulator = make_simulator()
    generator, draw = np.random.default_rng(0), random.Random(0)
    store.create_job(job_id, make_spec(job_id), at=at)
    store.advance(job_id, Step(at, next_trial=Trial(0, "search", simulator.default)))
    configuration, step = simulator.default, 0
    for index in range(trials):
        store.add_event(job_id, Event("switched", trial=index, step=step, seconds=0.05, at=at))
        observations = [
            _observation(simulator, configuration, generator, step + place)
            for place in range(STEPS)
        ]
        store.add_observations(job_id, index, observations, at)
        for place in range(PROFILES if index < PROFILED_TRIALS else 0):
            profile = simulator.profile(configuration, step + place, generator, NOISE)
            store.add_profile(job_id, index, profile, at)
        step += STEPS
        configuration = _drawn(simulator, draw)
        following = Trial(index + 1, "search", configuration)
        closed = Step(at, index, _estimate(observations), next_trial=following)
        if is_done and index == trials - 1:
            closed = Step(at, index, _estimate(observations), result=_result(configuration, index))
        store.advance(job_id, closed)
    if is_done:
        store.end_job(job_id, at)


@cache
def make_simulator() -> Simulator:
    cluster = Cluster(
        nodes=4, ranks_per_node=2, bandwidth_bytes_per_second=1.25e9, latency_seconds=1e-4
    )
    return Simulator(load("resnet50"), cluster)


def make_spec(name: str) -> JobSpec:
    simulator = make_simulator()
    return JobSpec(
        name=name,
        world_size=8,
        ranks_per_node=(2, 2, 2, 2),
        tensors=simulator.workload.tensors,
        knobs=simulator.space,
        default_configuration=dict(simulator.default),
        fingerprint="benchmark",
    )


def _drawn(simulator: Simulator, draw: random.Random) -> Configuration:
    drawn: dict[str, Value] = {
        knob: draw.choice(domain.values)
        for knob, domain in simulator.space.items()
        if isinstance(domain, Categorical)
    }
    size = 2 ** draw.randrange(17, 28)
    return Configuration({**simulator.default, **drawn, "bucket_bytes": size})


def _observation(
    simulator: Simulator, configuration: Configuration, generator: np.random.Generator, step: int
) -> Observation:
    seconds = tuple(simulator.observe(configuration, generator, NOISE))
    return Observation(step, seconds, tuple(0.8 * value for value in seconds))


def _estimate(observations: list[Observation]) -> Estimate:
    return estimate([StepTime().cost(observation.values) for observation in observations])


def _result(configuration: Configuration, index: int) -> Result:
    return Result(
        configuration, "winner", 1.2, 1.15, 1.25, index + 1, STEPS * index, 100.0, "done",
        cost_steps=12.0, cost_seconds=3.0, payback_steps=72,
    )  # fmt: skip


def _copy(connection: Connection, old: str, new: str, place: int) -> None:
    """Copy a job's rows, by the database itself."""
    changes = {"id": ":new", "name": ":new", "created_at": "created_at - :place"}
    _insert(connection, "jobs", changes, "FROM jobs WHERE id = :old", old, new, place)
    for table in ("trials", "events"):
        changes = {"id": "NULL", "job_id": ":new"}
        _insert(connection, table, changes, f"FROM {table} WHERE job_id = :old", old, new, place)
    for table in ("observations", "profiles"):
        source = (
            f"FROM {table} AS it JOIN trials AS was ON it.trial_id = was.id "
            'JOIN trials AS now ON now.job_id = :new AND now."index" = was."index" '
            "WHERE was.job_id = :old"
        )
        changes = {"id": "NULL", "trial_id": "now.id"}
        _insert(connection, table, changes, source, old, new, place)


def _insert(
    connection: Connection,
    table: str,
    changes: dict[str, str],
    source: str,
    old: str,
    new: str,
    place: int,
) -> None:
    found = connection.exec_driver_sql(f"PRAGMA table_info({table})")
    columns = [row[1] for row in found]
    prefix = "it." if " AS it " in source else ""
    values = [changes.get(column, f'{prefix}"{column}"') for column in columns]
    names = ", ".join(f'"{column}"' for column in columns)
    statement = f"INSERT INTO {table} ({names}) SELECT {', '.join(values)} {source}"
    connection.execute(text(statement), {"old": old, "new": new, "place": place})

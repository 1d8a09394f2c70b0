"""What a job gains from an earlier one in the service's store, and what it loses where that
misleads.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from bagua_autotune.store import Store
from bagua_autotune.tuning.tuner import Tuner
from bagua_simulator import Simulator
from bagua_simulator.workload import Workload
from benchmarks.support.noise.drawn import draw_model
from benchmarks.support.noise.jobs import MOST_STEPS, Row, WeatheredJob, case_of, ended, truth_of
from benchmarks.support.noise.odd import with_cluster, with_slower_links, with_workload
from benchmarks.support.noise.weather import Climate

CLIMATE = Climate("2 % by visit", by_visit=0.02)
# By how much the network of an earlier job was slower, or its computing, than that of the later.
OTHER_NETWORK, OTHER_COMPUTING = 8.0, 3.0


@dataclass(frozen=True)
class Earlier:
    """The earlier job of a pair.

    Attributes:
        claimed: what its registration says of model and network.
        real: what its steps were like; a misleading job claims something else.
    """

    claimed: Simulator
    real: Simulator


class EarlierJob(WeatheredJob):
    """A job whose steps may be others than its registration says."""

    real: Simulator | None = None

    @property
    def now(self) -> Simulator:
        assert isinstance(self.simulator, Simulator)
        return self.real or self.simulator


def _on_other_nodes(later: Simulator, _: np.random.Generator) -> Earlier:
    nodes = later.cluster.nodes
    other = with_cluster(
        later, replace(later.cluster, nodes=nodes // 2 if nodes > 2 else 2 * nodes)
    )
    return Earlier(other, other)


def _another_model(later: Simulator, generator: np.random.Generator) -> Earlier:
    other = with_workload(later, draw_model(generator).workload())
    return Earlier(other, other)


def _another_network(later: Simulator, _: np.random.Generator) -> Earlier:
    return Earlier(later, with_slower_links(later, OTHER_NETWORK))


def _other_devices(later: Simulator, _: np.random.Generator) -> Earlier:
    slow = _slower(later.workload, OTHER_COMPUTING)
    return Earlier(later, with_workload(later, slow))


def _slower(workload: Workload, factor: float) -> Workload:
    ready = tuple(factor * seconds for seconds in workload.ready_seconds)
    return replace(workload, forward_seconds=factor * workload.forward_seconds, ready_seconds=ready)


EARLIER: Mapping[str, Callable[[Simulator, np.random.Generator], Earlier]] = {
    "the same model on other nodes": _on_other_nodes,
    "another model, same network": _another_model,
    f"misleading: links were {OTHER_NETWORK:g}x slower": _another_network,
    f"misleading: computed {OTHER_COMPUTING:g}x slower": _other_devices,
}


@dataclass(frozen=True)
class Setting:
    """The drawn job of this number, after an earlier one."""

    draw: int
    number: int
    relation: str


def tune(setting: Setting) -> Row:
    """Tune a job by itself, and after the earlier one: ``fresh`` is by itself."""
    logging.disable(logging.WARNING)
    later = case_of(setting.draw, setting.number).simulator
    generator = np.random.default_rng((setting.draw, setting.number, 10))
    earlier = EARLIER[setting.relation](later, generator)
    store = Store("sqlite://")
    tuner = Tuner(store)
    first = EarlierJob.make(
        tuner, earlier.claimed, CLIMATE, setting.number, "first", fingerprint="another"
    )
    first.real = earlier.real
    first.run(MOST_STEPS, until_finished=True)
    after = _tuned(tuner, setting.draw, setting.number)
    store.close()
    case = case_of(setting.draw, setting.number)
    return {
        "problem": case.name,
        "truth": case.kind,
        "seed": setting.number,
        "relation": setting.relation,
        **after,
        "fresh": alone(setting.draw, setting.number),
    }


@cache
def alone(draw: int, number: int) -> Row:
    """The same job in a store of its own."""
    store = Store("sqlite://")
    found = _tuned(Tuner(store), draw, number)
    store.close()
    return found


def _tuned(tuner: Tuner, draw: int, number: int) -> Row:
    simulator = case_of(draw, number).simulator
    job = EarlierJob.make(tuner, simulator, CLIMATE, 1000 + number, "second")
    job.run(MOST_STEPS, until_finished=True)
    return ended(job, truth_of(draw, number))


def run(runs: int, processes: int, draw: int) -> list[Row]:
    """So many drawn jobs, each after an earlier one of every relation."""
    every = [Setting(draw, number, relation) for number in range(runs) for relation in EARLIER]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return pool.map(tune, every, chunksize=len(EARLIER))

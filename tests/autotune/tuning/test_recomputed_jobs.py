"""Jobs whose blocks recompute their activations, tuned to the end."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median

import pytest

from bagua_autotune.measuring.rounds import Round, with_ceiling
from bagua_autotune.store import Store
from bagua_autotune.tuning.tuner import Tuner
from bagua_simulator import Cluster, Workload
from bagua_simulator.recomputation import Block, RecomputingSimulator, Room, replicated, sharded
from bagua_simulator.sharded import Unit
from bagua_simulator.workloads import load
from tests.autotune.simulated_job import SimulatedJob
from tests.autotune.support import present

pytestmark = pytest.mark.slow

GIB = 2**30
ALONE = Cluster(1, 1, 1e9, 0.0)
NVLINK = Cluster(1, 2, 1e9, 0.0, inside_bandwidth_bytes_per_second=150e9, is_nccl=True)
KNOB = "recomputed_blocks"
MOST_STEPS = 60
"""The job's own warm-up is about half of them."""


def workload(seconds: float = 0.25) -> Workload:
    model = load("gpt2-medium")
    factor = seconds / model.compute_seconds
    ready = tuple(each * factor for each in model.ready_seconds)
    return replace(model, forward_seconds=model.forward_seconds * factor, ready_seconds=ready)


def blocks(seconds: float, gib: float, count: int = 16) -> list[Block]:
    return [Block(seconds / count, gib * GIB / count)] * count


def alone(room: Room, gib: float, seconds: float = 0.06, count: int = 16) -> RecomputingSimulator:
    return RecomputingSimulator(replicated(workload(), ALONE), blocks(seconds, gib, count), room)


def tuned(
    simulator: RecomputingSimulator,
    knobs: tuple[str, ...] = (KNOB,),
    seed: int = 0,
    noise: float = 0.02,
    tuner: Tuner | None = None,
    name: str = "job",
) -> SimulatedJob:
    job = SimulatedJob(
        tuner or Tuner(Store("sqlite://")), simulator, name, seed, noise, knobs=knobs, name="job",
        straggler_probability=0.0, limits={"warmup_seconds": 30.0},
    )  # fmt: skip
    job.run(2000, until_finished=True)
    assert job.is_finished
    return job


def test_where_there_is_room_none_is_recomputed_and_that_is_tried_first() -> None:
    job = tuned(alone(Room(18 * GIB, 140 * GIB), 26))
    assert [each.configuration[KNOB] for each in job.switches] == [16, 0, 16, 0, 0]
    assert job.step <= MOST_STEPS
    assert job.refused == []


def test_on_a_fast_network_the_same_is_found_in_as_few_steps() -> None:
    ddp = RecomputingSimulator(replicated(workload(), NVLINK), blocks(0.06, 26))
    units = [Unit(str(place), 50_000_000, 0.005, str(place == 0)) for place in range(17)]
    fsdp = RecomputingSimulator(sharded(units, Cluster(2, 1, 100e9, 1e-5)), blocks(0.06, 13))
    for simulator, others in (
        (ddp, ("bucket_bytes", "channels", "first_bucket_bytes", "last_bucket_bytes")),
        (fsdp, ("bucket_bytes", "channels", "kept_units", "prefetch", "scatter_group")),
    ):
        jobs = [tuned(simulator, (*others, KNOB), seed) for seed in range(8)]
        least = {**jobs[0].baseline, KNOB: 0}
        first = jobs[0]
        assert first.true_seconds(first.configuration) < 1.01 * first.true_seconds(least)
        assert median(job.step for job in jobs) <= MOST_STEPS


def test_what_computing_costs_is_known_from_the_trials_that_recompute_least() -> None:
    simulator = RecomputingSimulator(replicated(workload(), NVLINK), blocks(0.06, 26))
    job = tuned(simulator, ("bucket_bytes", KNOB))
    store = job.tuner.store
    round_ = with_ceiling(store, Round.of(store.jobs.get("job"), store.trials.of("job")))
    floor = present(round_.floor)
    assert floor.recomputed == 0
    computing = simulator.computing_seconds({**job.baseline, KNOB: 0})
    assert math.exp(floor.cost) == pytest.approx(computing, rel=0.05)
    assert round_.ceiling is None, "the default's steps say nothing of it"


def test_where_memory_is_short_as_few_are_recomputed_as_fit_after_few_refusals() -> None:
    job = tuned(alone(Room(34 * GIB, 80 * GIB), 60))
    assert job.configuration[KNOB] == min(
        each.configuration[KNOB] for each in job.switches if each.trial is not None
    )
    assert 1 <= len(job.refused) <= 3
    assert job.true_seconds(job.baseline) > 1.1 * job.true_seconds(job.configuration)


def test_where_recomputing_costs_nothing_the_default_stays() -> None:
    job = tuned(alone(Room(18 * GIB, 140 * GIB), 26, seconds=0.0))
    result = present(job.status.result)
    assert result.kept == "baseline"


def test_what_an_earlier_run_had_no_room_for_is_tried_where_there_is_some() -> None:
    """Both offer the same numbers, so that they are the same job to the service."""
    tuner = Tuner(Store("sqlite://"))
    short, roomy = (alone(Room(10 * GIB, gib * GIB), 25, count=5) for gib in (33.4, 140))
    assert short.space == roomy.space
    first = tuned(short, tuner=tuner, name="first")
    assert first.configuration[KNOB] == 1
    second = tuned(roomy, tuner=tuner, name="second")
    assert second.configuration[KNOB] == 0

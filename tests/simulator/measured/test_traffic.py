"""What of a job's profiled steps goes into its record: what travels, and what it computes, told
from steps in which it also communicates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bagua_simulator import Simulator
from bagua_simulator.measured.computing import fit_computing
from bagua_simulator.measured.fitting import fit_record
from bagua_simulator.measured.recorded import summarise
from bagua_simulator.measured.traffic import MOST_BUCKETS, traffic_of
from bagua_wire.profile import BucketTiming, Profile
from tests.simulator.jobs import MIB, Knobs, make_cluster, make_tensors, make_workload

pytestmark = pytest.mark.slow


FLAT: Knobs = {"hierarchical": "off", "channels": 1}


def profile(*ends: float, step: int = 1, count: int = 1) -> Profile:
    """Buckets of 1 MiB that start together after 0.5 s."""
    buckets = tuple(
        BucketTiming(bytes=MIB, started_seconds=0.5, ended_seconds=end) for end in ends * count
    )
    return Profile(step=step, step_seconds=1.0, ready_seconds=(0.5,), buckets=buckets)


def test_steps_that_ran_alike_become_one_of_medians() -> None:
    steps = [(FLAT, profile(end)) for end in (0.6, 0.9, 0.61, 0.62)]
    (only,) = traffic_of([*steps, (FLAT, profile(0.63))])
    assert only.steps == 5
    assert only.buckets[0].ended_seconds == pytest.approx(0.62)
    assert only.spread == pytest.approx(1.4826 * 0.087, rel=0.05)  # of 0.11 and 0.12


def test_other_channels_and_ways_are_apart() -> None:
    knobs: list[Knobs] = [FLAT, {**FLAT, "channels": 4096}, {**FLAT, "hierarchical": "shards"}, {}]
    found = traffic_of([(each, profile(0.6)) for each in knobs])
    assert [(each.hierarchical, each.channels, each.steps) for each in found] == [
        ("off", 1, 2), ("off", 4096, 1), ("shards", 1, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "knobs",
    [
        {"hierarchical": "tree"},
        {"hierarchical": 1},
        {"wire_precision": "bf16"},
        {"algorithm": "bytegrad"},
    ],
)
def test_a_way_that_is_not_simulated_is_left_out_and_the_rest_stays(knobs: Knobs) -> None:
    steps = [(FLAT, profile(0.6)), (knobs, profile(0.7))]
    found = summarise("job", (2, 2), make_tensors([MIB // 4]), steps)
    assert [each.buckets[0].ended_seconds for each in found.traffic] == [0.6]
    assert fit_record(found).step_seconds({}) > 0.5


def test_a_step_in_which_nothing_was_measured_is_left_out() -> None:
    assert traffic_of([(FLAT, profile(0.5, 0.5))]) == ()
    (only,) = traffic_of([(FLAT, profile(0.5, 0.6))])
    assert len(only.buckets) == 2


def test_of_a_long_step_only_the_beginning_is_kept() -> None:
    (only,) = traffic_of([(FLAT, profile(0.6, count=5000))])
    assert len(only.buckets) == MOST_BUCKETS


WORKLOAD = make_workload([MIB // 8, MIB // 2] * 15, milliseconds=12.0)
CLUSTER = make_cluster(nodes=2, bandwidth=1.25e8, latency_seconds=2e-4)
TRIALS: list[Knobs] = [
    {"bucket_bytes": size, "hierarchical": way, "channels": 1}
    for size in (25 * MIB, 4 * MIB, MIB)
    for way in ("off", "leaders", "shards")
]


def stretched(profile: Profile, factor: float) -> Profile:
    """All of it takes so many times as long, as beside another job."""
    buckets = tuple(
        replace(
            bucket,
            started_seconds=bucket.started_seconds * factor,
            ended_seconds=bucket.ended_seconds * factor,
        )
        for bucket in profile.buckets
    )
    ready = tuple(seconds * factor for seconds in profile.ready_seconds)
    return replace(profile, buckets=buckets, ready_seconds=ready)


@pytest.mark.parametrize("contention", [0.0, 0.3])
def test_contention_and_computing_come_back(contention: float) -> None:
    simulator = Simulator(WORKLOAD, CLUSTER, contention)
    found = fit_computing([(knobs, simulator.profile(knobs)) for knobs in TRIALS])
    assert found.contention == pytest.approx(contention, rel=0.1, abs=0.01)
    assert found.forward_seconds + found.ready_seconds[-1] == pytest.approx(
        WORKLOAD.compute_seconds, rel=0.015
    )


def test_a_trial_that_was_slow_as_a_whole_is_not_taken_for_contention() -> None:
    simulator = Simulator(WORKLOAD, CLUSTER, contention=0.1)
    for trials in (TRIALS[::8], TRIALS[::4], TRIALS):
        *others, last = [
            (knobs, simulator.profile(knobs, step)) for knobs in trials for step in range(3)
        ]
        slow = [
            (knobs, stretched(profile, 1.4)) if knobs == last[0] else (knobs, profile)
            for knobs, profile in [*others, last]
        ]
        assert fit_computing(slow).contention == pytest.approx(0.1, abs=0.06)

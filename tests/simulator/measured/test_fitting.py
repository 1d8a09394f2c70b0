"""The network that is told from a job's traffic, also where a trial was disturbed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from bagua_simulator import Cluster, Simulator
from bagua_simulator.measured.fitting import fit_cluster, fit_record
from bagua_simulator.measured.recorded import Record, Traffic, summarise, traffic_of
from bagua_wire.profile import BucketTiming, Profile
from tests.simulator.jobs import MIB, SMALL, SMALL_TRIALS, Knobs, make_cluster, make_workload

pytestmark = pytest.mark.slow

WORKLOAD = make_workload([MIB // 8, MIB // 2] * 30, milliseconds=3.0)
SLOW = replace(
    make_cluster(nodes=2, bandwidth=1.25e8, latency_seconds=2e-4),
    inside_bandwidth_bytes_per_second=1e9,
)
TRIALS: list[Knobs] = [
    {"bucket_bytes": 25 * MIB, "hierarchical": "off", "channels": 1},
    {"bucket_bytes": 4 * MIB, "hierarchical": "leaders", "channels": 2},
    {"bucket_bytes": 8 * MIB, "hierarchical": "shards", "channels": 1},
    {"bucket_bytes": MIB, "hierarchical": "leaders", "channels": 1},
    {"bucket_bytes": 2 * MIB, "hierarchical": "off", "channels": 1},
]
Steps = list[tuple[Knobs, Profile]]


def profiled(simulator: Simulator, trials: Sequence[Knobs], noise: float = 0.0) -> Steps:
    """Three steps of each."""
    generator = np.random.default_rng(1)
    return [
        (knobs, simulator.profile(knobs, step, generator, noise))
        for knobs in trials
        for step in range(3)
    ]


def ended_later(profile: Profile, seconds: float) -> Profile:
    buckets = tuple(
        replace(bucket, ended_seconds=bucket.ended_seconds + seconds) for bucket in profile.buckets
    )
    return replace(profile, buckets=buckets)


def stretched(profile: Profile) -> Profile:
    """Its buckets travel for twice as long."""
    buckets = tuple(
        replace(bucket, ended_seconds=2 * bucket.ended_seconds - bucket.started_seconds)
        for bucket in profile.buckets
    )
    return replace(profile, buckets=buckets)


def small_record(noise: float) -> Record:
    steps = profiled(SMALL, SMALL_TRIALS, noise)
    return summarise("small", (2,) * 4, SMALL.workload.tensors, steps)


def test_the_record_foretells_configurations_that_were_never_run() -> None:
    found = small_record(0.05)
    again = fit_record(found)
    others: list[Knobs] = [
        {"bucket_bytes": 16 * MIB},
        {"bucket_bytes": MIB, "hierarchical": "shards"},
    ]
    for knobs in others:
        assert again.step_seconds(knobs) == pytest.approx(SMALL.step_seconds(knobs), rel=0.05)


def test_waiting_for_the_slowest_rank_is_not_taken_for_the_network() -> None:
    """The first reduction begins on all ranks only when the slowest has computed so far."""
    steps = [(knobs, ended_later(profile, 0.1)) for knobs, profile in profiled(SMALL, SMALL_TRIALS)]
    found = summarise("small", (2,) * 4, SMALL.workload.tensors, steps)
    fitted = fit_cluster(4, 2, found.traffic)
    assert fitted.bandwidth_bytes_per_second == pytest.approx(1e9, rel=0.05)


SLEEPING = Simulator(
    make_workload([MIB // 8, MIB // 2] * 15, milliseconds=12.0),
    replace(
        make_cluster(nodes=2, bandwidth=1.25e8, latency_seconds=2e-4),
        inside_bandwidth_bytes_per_second=5e8,
        shards_share=0.5,
        start_seconds=2e-4,
    ),
    contention=0.0,
    launch_seconds=0.0,
)


def test_all_figures_of_a_cluster_come_back_from_every_way_of_reducing() -> None:
    ways: list[Knobs] = [
        {"bucket_bytes": size, "hierarchical": way, "channels": channels}
        for way in ("off", "leaders", "shards")
        for size, channels in ((25 * MIB, 1), (4 * MIB, 2), (MIB, 1))
    ]
    steps = [(knobs, SLEEPING.profile(knobs, step)) for knobs in ways for step in range(3)]
    found = fit_record(summarise("slow", (2, 2), SLEEPING.workload.tensors, steps))
    for name in ("bandwidth_bytes_per_second", "inside_bandwidth_bytes_per_second", "shards_share"):
        assert getattr(found.cluster, name) == pytest.approx(
            getattr(SLEEPING.cluster, name), rel=0.06
        )
    assert found.cluster.latency_seconds == pytest.approx(2e-4, rel=0.5)
    assert found.contention < 0.02
    for knobs in ways:
        assert found.step_seconds(knobs) == pytest.approx(SLEEPING.step_seconds(knobs), rel=0.01)


@pytest.mark.parametrize("filling", [1, 3])
def test_what_one_connection_sends_is_told_by_steps_with_more_of_them(filling: int) -> None:
    """Where three of them fill the link, and where one does."""
    cluster = replace(SLEEPING.cluster, flow_bytes_per_second=1.25e8 / filling)
    truth = Simulator(SLEEPING.workload, cluster, contention=0.0, launch_seconds=0.0)
    measured: list[Knobs] = [
        {"bucket_bytes": size, "hierarchical": "off", "channels": channels}
        for size, channels in ((25 * MIB, 1), (4 * MIB, 2), (MIB, 1), (MIB, 4))
    ]
    found = fit_record(
        summarise("slow", (2, 2), truth.workload.tensors, profiled(truth, measured, 0.02))
    )
    for channels in (1, 2, 8):
        knobs: Knobs = {"bucket_bytes": 2 * MIB, "hierarchical": "off", "channels": channels}
        assert found.step_seconds(knobs) == pytest.approx(truth.step_seconds(knobs), rel=0.1)


def test_steps_that_were_not_recorded_set_a_disturbed_one_right() -> None:
    """On a GPU one step of each configuration is recorded, and none with many channels. The only
    two with several were held up; all that were measured say how fast the link is."""
    cluster = replace(SLEEPING.cluster, flow_bytes_per_second=1.25e8 / 3)
    truth = Simulator(SLEEPING.workload, cluster, contention=0.0, launch_seconds=0.0)
    tried: list[Knobs] = [
        {"bucket_bytes": size, "hierarchical": "off", "channels": channels}
        for size, channels in ((25 * MIB, 1), (4 * MIB, 2), (MIB, 2), (2 * MIB, 4), (MIB, 8))
    ]
    one, *several = profiled(truth, tried[:3])[::3]
    recorded = [one, *((knobs, stretched(profile)) for knobs, profile in several)]
    steps = [(knobs, truth.step_seconds(knobs)) for knobs in tried for _ in range(5)]
    tensors = truth.workload.tensors
    without = fit_record(summarise("slow", (2, 2), tensors, recorded))
    assert without.step_seconds(tried[4]) > 1.3 * truth.step_seconds(tried[4])
    found = fit_record(summarise("slow", (2, 2), tensors, recorded, steps))
    for knobs in tried:
        assert found.step_seconds(knobs) == pytest.approx(truth.step_seconds(knobs), rel=0.05)


def test_one_size_alone_leaves_a_plausible_latency() -> None:
    (first, *_) = small_record(0.0).traffic
    fitted = fit_cluster(4, 2, [Traffic(buckets=first.buckets[:1])] * 5)
    assert 1e-7 < fitted.latency_seconds < 1e-2


def test_a_job_in_one_node_tells_the_links_inside_it() -> None:
    simulator = Simulator(SMALL.workload, make_cluster(nodes=1, ranks_per_node=4))
    steps = [(knobs, simulator.profile(knobs)) for knobs in SMALL_TRIALS[:2]]
    traffic = summarise("one", (4,), simulator.workload.tensors, steps).traffic
    assert fit_cluster(1, 4, traffic).inside_bandwidth_bytes_per_second == pytest.approx(
        simulator.cluster.inside_bandwidth_bytes_per_second, rel=0.05
    )


def test_steps_with_buckets_of_other_tensors_are_left_out() -> None:
    """As of trials before the model changed."""
    steps = profiled(SMALL, SMALL_TRIALS)
    strange: Knobs = {**SMALL_TRIALS[0], "buckets": (1, 2)}
    tensors = SMALL.workload.tensors
    with_it = fit_record(summarise("small", (2,) * 4, tensors, steps, [(strange, 9.0)] * 9))
    assert with_it.cluster == fit_record(summarise("small", (2,) * 4, tensors, steps)).cluster


def test_nothing_is_told_from_nothing() -> None:
    with pytest.raises(ValueError, match="no reduction was measured"):
        fit_cluster(4, 2, [])
    with pytest.raises(ValueError, match="no reduction was measured"):
        fit_cluster(1, 1, small_record(0.0).traffic)


@pytest.mark.parametrize("trial", [0, 2])
def test_a_trial_that_was_late_as_a_whole_does_not_decide(trial: int) -> None:
    truth = Simulator(WORKLOAD, SLOW)
    steps = [
        (knobs, ended_later(profile, 0.3) if knobs == TRIALS[trial] else profile)
        for knobs, profile in profiled(truth, TRIALS)
    ]
    found = fit_record(summarise("late", (2, 2), WORKLOAD.tensors, steps))
    assert found.cluster.bandwidth_bytes_per_second == pytest.approx(1.25e8, rel=0.05)
    assert found.cluster.shards_share > 0.7
    for way in ("off", "leaders", "shards"):
        for size in (MIB // 2, 5 * MIB, 25 * MIB):
            knobs: Knobs = {"bucket_bytes": size, "hierarchical": way}
            assert found.step_seconds(knobs) == pytest.approx(truth.step_seconds(knobs), rel=0.04)


def test_steps_of_one_trial_that_differ_say_little() -> None:
    """The only sharded trial: late by much, by less and not at all."""
    late = {0: 0.4, 1: 0.2, 2: 0.0}
    steps = [
        (knobs, ended_later(profile, late[profile.step] if knobs == TRIALS[2] else 0.0))
        for knobs, profile in profiled(Simulator(WORKLOAD, SLOW), TRIALS)
    ]
    fitted = fit_cluster(2, 2, traffic_of(steps))
    assert fitted.shards_share > 0.7


def test_a_bucket_without_length_tells_nothing() -> None:
    """As where a bucket's end was cut off at the step's."""

    def step(*buckets: tuple[int, float, float]) -> Traffic:
        return Traffic(
            buckets=tuple(
                BucketTiming(bytes=size, started_seconds=start, ended_seconds=end)
                for size, start, end in buckets
            )
        )

    traffic = [
        step((5 * MIB, 0.0, 0.05), (5 * MIB, 0.05, 0.1)),
        step((MIB, 0.0, 0.011), (MIB, 0.1, 0.111)),
    ]
    cut = step((3 * MIB, 0.0, 0.03), (1000, 0.05, 0.05))
    whole = step((3 * MIB, 0.0, 0.03))
    with_it, without = fit_cluster(2, 2, [*traffic, cut]), fit_cluster(2, 2, [*traffic, whole])
    assert with_it.latency_seconds == pytest.approx(without.latency_seconds, rel=0.3)


FAST_TRIALS: list[Knobs] = [
    {"bucket_bytes": size, "hierarchical": way, "channels": 1}
    for way in ("off", "leaders", "shards")
    for size in (25 * MIB, 4 * MIB, MIB)
]


def test_a_fast_network_comes_back_from_flat_sums() -> None:
    """Where the links inside a node are not far above the one to the others."""
    cluster = Cluster(4, 8, 25e9, 5e-6, 2e11)
    steps = profiled(Simulator(WORKLOAD, cluster), FAST_TRIALS[:3], noise=0.02)
    found = fit_record(summarise("fast", (8,) * 4, WORKLOAD.tensors, steps))
    assert found.cluster.bandwidth_bytes_per_second == pytest.approx(25e9, rel=0.1)


def test_a_faster_network_brings_what_it_would() -> None:
    """Four times 100 Gbit/s, for gradients that keep the network busy."""
    workload = make_workload((4 * MIB,) * 40, milliseconds=1.0)
    cluster = Cluster(4, 8, 12.5e9, 5e-6)
    truth = Simulator(workload, cluster)
    steps = profiled(truth, FAST_TRIALS[:6], noise=0.02)
    found = fit_record(summarise("fast", (8,) * 4, workload.tensors, steps))
    for bandwidth in (12.5e9, 50e9):
        there, again = (
            Simulator(
                each.workload,
                replace(each.cluster, bandwidth_bytes_per_second=bandwidth),
                each.contention,
                each.launch_seconds,
            )
            for each in (truth, found)
        )
        for knobs in FAST_TRIALS:
            assert again.step_seconds(knobs) == pytest.approx(there.step_seconds(knobs), rel=0.05)


def test_a_share_of_the_links_inside_is_a_share() -> None:
    for share in (0.0, 1.2):
        with pytest.raises(ValueError, match="shards_share is"):
            replace(SLOW, shards_share=share)
    steps = profiled(Simulator(WORKLOAD, SLOW), TRIALS, noise=0.05)
    assert 0 < fit_cluster(2, 2, traffic_of(steps)).shards_share <= 1

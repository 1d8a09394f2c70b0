"""What a job computes, told from steps in which it also communicates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bagua_simulator import Simulator
from bagua_simulator.measured.computing import fit_computing
from bagua_wire.profile import Profile
from tests.simulator.jobs import MIB, Knobs, make_cluster, make_workload

pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize("contention", [0.0, 0.1, 0.3])
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

"""Records of measured jobs: which steps go into one, what of them, and through a file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bagua_simulator import Simulator
from bagua_simulator.measured.computing import fit_computing
from bagua_simulator.measured.fitting import fit_record
from bagua_simulator.measured.recorded import (
    MOST_BUCKETS,
    MOST_CONFIGURATIONS,
    Record,
    RecordError,
    load_record,
    step_times_of,
    summarise,
    traffic_of,
)
from bagua_simulator.sweep import sweep
from bagua_wire.profile import BucketTiming, Profile
from tests.simulator.jobs import (
    MIB,
    SMALL,
    SMALL_TRIALS,
    Knobs,
    make_cluster,
    make_tensors,
    make_workload,
)

pytestmark = pytest.mark.slow


STEPS = [
    (knobs, SMALL.profile(knobs, 10 * trial + step))
    for trial, knobs in enumerate(SMALL_TRIALS)
    for step in range(3)
]


def record() -> Record:
    return summarise("small", (2,) * 4, SMALL.workload.tensors, STEPS)


def test_without_noise_the_workload_comes_back() -> None:
    found, truth = record().workload, SMALL.workload
    assert found.compute_seconds == pytest.approx(truth.compute_seconds, rel=1e-3)
    assert found.forward_seconds == pytest.approx(truth.forward_seconds + truth.ready_seconds[0])
    assert np.diff(found.ready_seconds) == pytest.approx(np.diff(truth.ready_seconds), abs=3e-4)


def test_what_is_no_job_is_refused() -> None:
    with pytest.raises(ValueError, match="no step of this job has been profiled"):
        summarise("small", (2,), SMALL.workload.tensors, [])
    with pytest.raises(ValueError, match="60 tensors; the job has 59"):
        summarise("small", (2,), SMALL.workload.tensors[1:], STEPS)


def test_the_job_s_own_default_is_simulated_as_its_default(tmp_path: Path) -> None:
    own: Knobs = {"bucket_bytes": 10 * MIB, "hierarchical": "shards", "channels": 2, "buckets": ()}
    usual: Knobs = {"algorithm": "gradient_allreduce", "wire_precision": "as_is", "cache": 4}
    path, tensors = tmp_path / "job.json", SMALL.workload.tensors
    written = summarise("small", (2,) * 4, tensors, STEPS, default={**own, **usual})
    path.write_text(written.model_dump_json())
    found = load_record(path)
    assert found == written
    assert found.default == own
    swept = sweep(found.simulator(SMALL.cluster))
    assert swept.default.configuration == {**SMALL.default, **own}
    assert swept.default.step_seconds == swept.simulator.step_seconds(own)
    assert {each.configuration["channels"] for each in swept.lines["off"]} == {1}
    assert swept.speedup >= 1
    alone = sweep(found.simulator(make_cluster(nodes=1, ranks_per_node=1)))
    assert alone.speedup == 1, "nothing travels"


@pytest.mark.parametrize(
    "strange",
    [
        {"kept_units": 0},
        {"prefetch_bytes": 0},
        {"algorithm": "bytegrad"},
        {"hierarchical": "own"},
        {"wire_precision": "bf16"},
    ],
)
def test_a_default_that_is_not_simulated_is_left_out(strange: Knobs) -> None:
    default = {"bucket_bytes": MIB, **strange}
    found = summarise("small", (2,) * 4, SMALL.workload.tensors, STEPS, default=default)
    assert found.default is None
    assert sweep(found.simulator(SMALL.cluster)).default.configuration == SMALL.default


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format": "something"}, "format: Input should be 'bagua-autotune profile'"),
        ({"version": 4}, "version: Input should be 3"),
        ({"ready_seconds": [1.0]}, "ready_seconds has 1 entries for 60 tensors"),
        ({"ready_seconds": [1.0] * 59 + [0.5]}, "ready_seconds must ascend"),
        ({"ranks_per_node": []}, "ranks_per_node"),
        ({"forward_seconds": -1.0}, "forward_seconds"),
        ({"traffic": [{"buckets": []}]}, "traffic.0.buckets"),
        ({"more": 1}, "more: Extra inputs are not permitted"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_by_name_and_place(
    tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({**record().model_dump(mode="json"), **change}))
    with pytest.raises(RecordError, match="is not a file of") as caught:
        load_record(path)
    assert complaint in str(caught.value)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    with pytest.raises(RecordError, match="Invalid JSON"):
        load_record(tmp_path / "text")
    with pytest.raises(RecordError, match="cannot be read"):
        load_record(tmp_path / "missing")
    (tmp_path / "deep").write_text("[" * 200_000)
    with pytest.raises(RecordError, match="recursion limit"):
        load_record(tmp_path / "deep")


FLAT: Knobs = {"bucket_bytes": 25 * MIB, "hierarchical": "off", "channels": 1}


def test_steps_with_one_configuration_become_one_entry() -> None:
    """Also those of two visits, with others in between."""
    two: Knobs = {**FLAT, "channels": 2}
    found = step_times_of([(FLAT, 0.2), (FLAT, 0.9), (two, 0.1), (FLAT, 0.3)])
    assert [(each.configuration, each.steps) for each in found] == [(FLAT, 3), (two, 1)]
    first, single = found
    assert (first.seconds, first.low_seconds, first.high_seconds) == (0.3, 0.2, 0.9)
    assert (single.spread, single.uncertainty) == (0.0, 0.0)
    assert first.uncertainty == pytest.approx(first.spread / 3**0.5)


def test_what_is_simulated_in_another_way_and_a_step_without_length_are_left_out() -> None:
    other: Knobs = {**FLAT, "wire_precision": "bf16"}
    algorithm: Knobs = {**FLAT, "algorithm": "bytegrad"}
    way: Knobs = {**FLAT, "hierarchical": "tree"}
    sharded: Knobs = {"kept_units": 4, "channels": 1}
    others = [(knobs, 0.1) for knobs in (other, algorithm, way, sharded)]
    found = step_times_of([(FLAT, 0.2), (FLAT, 0.0), *others])
    assert [(each.seconds, each.steps) for each in found] == [(0.2, 1)]


def test_of_many_configurations_those_with_the_most_steps_stay() -> None:
    many = [({**FLAT, "bucket_bytes": size}, 0.1) for size in range(1, 100)]
    found = step_times_of([*many, (FLAT, 0.2), (FLAT, 0.2)])
    assert len(found) == MOST_CONFIGURATIONS
    assert found[0].configuration == FLAT


UNCUT: Knobs = {"hierarchical": "off", "channels": 1}


def profile(*ends: float, step: int = 1, count: int = 1) -> Profile:
    """Buckets of 1 MiB that start together after 0.5 s."""
    buckets = tuple(
        BucketTiming(bytes=MIB, started_seconds=0.5, ended_seconds=end) for end in ends * count
    )
    return Profile(step=step, step_seconds=1.0, ready_seconds=(0.5,), buckets=buckets)


def test_steps_that_ran_alike_become_one_of_medians() -> None:
    steps = [(UNCUT, profile(end)) for end in (0.6, 0.9, 0.61, 0.62)]
    (only,) = traffic_of([*steps, (UNCUT, profile(0.63))])
    assert only.steps == 5
    assert only.buckets[0].ended_seconds == pytest.approx(0.62)
    assert only.spread == pytest.approx(1.4826 * 0.087, rel=0.05)  # of 0.11 and 0.12


def test_other_channels_and_ways_are_apart() -> None:
    others: list[Knobs] = [{**UNCUT, "channels": 4096}, {**UNCUT, "hierarchical": "shards"}, {}]
    found = traffic_of([(each, profile(0.6)) for each in (UNCUT, *others)])
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
    steps = [(UNCUT, profile(0.6)), (knobs, profile(0.7))]
    found = summarise("job", (2, 2), make_tensors([MIB // 4]), steps)
    assert [each.buckets[0].ended_seconds for each in found.traffic] == [0.6]
    assert fit_record(found).step_seconds({}) > 0.5


def test_a_step_in_which_nothing_was_measured_is_left_out() -> None:
    assert traffic_of([(UNCUT, profile(0.5, 0.5))]) == ()
    (only,) = traffic_of([(UNCUT, profile(0.5, 0.6))])
    assert len(only.buckets) == 2


def test_of_a_long_step_only_the_beginning_is_kept() -> None:
    (only,) = traffic_of([(UNCUT, profile(0.6, count=5000))])
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

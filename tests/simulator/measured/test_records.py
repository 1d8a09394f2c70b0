"""Records of measured jobs: which steps go into one, what of them, and through a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bagua_simulator.measured.recorded import Record, RecordError, load_record, summarise
from bagua_simulator.measured.traffic import MOST_CONFIGURATIONS, step_times_of
from bagua_simulator.sweep import sweep
from tests.simulator.jobs import MIB, SMALL, SMALL_TRIALS, Knobs, make_cluster

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

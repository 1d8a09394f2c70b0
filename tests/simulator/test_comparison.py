"""Ways to train side by side."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bagua_simulator import Simulator
from bagua_simulator.algorithms import (
    ALGORITHMS,
    DEFAULT,
    SHARDED,
    SIZES_BYTES,
    WAYS,
    Replicas,
    compare,
    fastest,
    sharded,
    units_of,
)
from bagua_simulator.measured.fitting import fit_record
from bagua_simulator.measured.recorded import summarise
from bagua_simulator.sweep import find_best
from bagua_simulator.workloads import load
from tests.simulator.jobs import MIB, make_cluster, make_workload

pytestmark = pytest.mark.slow

SIMULATOR = Simulator(make_workload([MIB // 2] * 20), make_cluster(bandwidth=1e9))


def test_every_way_is_there_at_a_setting_that_takes_as_long_as_said() -> None:
    found = {outcome.way: outcome for outcome in compare(SIMULATOR)}
    assert [*found] == [*WAYS]
    for way, sends in ALGORITHMS.items():
        again = Replicas(SIMULATOR, sends).step_seconds(found[way].configuration)
        assert found[way].step_seconds == again
    for way in SHARDED:
        again = sharded(SIMULATOR).step_seconds(found[way].configuration)
        assert found[way].step_seconds == again
    assert found["gradient_allreduce"].step_seconds <= found[DEFAULT].step_seconds
    for outcome in found.values():
        assert 0 <= outcome.exposed_share < 1
        alone = outcome.compute_seconds / outcome.step_seconds
        assert outcome.exposed_share == pytest.approx(max(0.0, 1 - alone))
    assert fastest([*found.values()]).step_seconds == min(o.step_seconds for o in found.values())
    assert fastest([*found.values()], [DEFAULT]) == found[DEFAULT]


def test_small_buckets_are_compared_as_far_down_as_the_best_of_all_is_looked_for() -> None:
    workload = make_workload([16 * 1024] * 40, milliseconds=0.1)
    small = Simulator(workload, make_cluster(latency_seconds=1e-5))
    best = find_best(small)
    assert best.configuration.number("bucket_bytes") < MIB
    (found,) = compare(small, ["gradient_allreduce"])
    assert found.step_seconds <= best.step_seconds * 1.005
    domain = small.space["bucket_bytes"]
    assert (SIZES_BYTES[0], SIZES_BYTES[-1]) == (domain["low"], domain["high"])


def test_a_recorded_jobs_own_cluster_gets_its_own_prediction() -> None:
    configurations = [{**SIMULATOR.default, "bucket_bytes": size * MIB} for size in (1, 4, 25)]
    steps = [(each, SIMULATOR.profile(each, step)) for step, each in enumerate(configurations)]
    record = summarise("recorded", [2] * 4, SIMULATOR.tensors, steps)
    own = fit_record(record)
    (default,) = compare(record.simulator(own.cluster), [DEFAULT])
    assert default.step_seconds == own.step_seconds(own.default)
    truth = SIMULATOR.step_seconds(SIMULATOR.default)
    assert default.step_seconds == pytest.approx(truth, rel=0.03)


@pytest.mark.parametrize("way", WAYS)
def test_the_best_on_a_faster_link_is_never_slower(way: str) -> None:
    slow = SIMULATOR.cluster
    fast = replace(slow, bandwidth_bytes_per_second=4 * slow.bandwidth_bytes_per_second)
    before, after = (
        compare(Simulator(SIMULATOR.workload, each), [way])[0].step_seconds for each in (slow, fast)
    )
    assert after <= before * (1 + 1e-9)


def test_blocks_are_units_and_compute_as_long_as_the_model_together() -> None:
    workload = load("bert-base")
    units = units_of(workload)
    assert len(units) == 13
    assert units[0].group == "root"
    assert [unit.name for unit in units[1:3]] == ["bert.encoder.layer.0", "bert.encoder.layer.1"]
    assert sum(unit.elements for unit in units) == sum(t.elements for t in workload.tensors)
    together = sum(3 * unit.forward_seconds for unit in units)
    assert together == pytest.approx(workload.compute_seconds)


def test_a_sharded_model_whose_link_costs_nothing_computes_only() -> None:
    cluster = make_cluster(nodes=2, ranks_per_node=1, bandwidth=1e15, latency_seconds=0.0)
    model = sharded(Simulator(load("bert-base"), cluster))
    compute_seconds = load("bert-base").compute_seconds
    assert model.step_seconds(model.default) == pytest.approx(compute_seconds, rel=0.05)

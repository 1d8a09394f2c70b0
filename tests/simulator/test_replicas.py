"""Steps under each algorithm, and ways to train side by side."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_simulator import Cluster, Simulator, Workload
from bagua_simulator.algorithms import (
    ALGORITHMS,
    DEFAULT,
    SHARDED,
    SIZES_BYTES,
    WAYS,
    Replicas,
    Sends,
    compare,
    fastest,
    sharded,
    units_of,
)
from bagua_simulator.sweep import find_best
from bagua_simulator.workloads import load
from tests.simulator.jobs import MIB, SIZES, make_cluster, make_workload

pytestmark = pytest.mark.slow

NAMES = st.sampled_from([*ALGORITHMS])
KNOBS = st.fixed_dictionaries(
    {
        "bucket_bytes": st.integers(64 * 1024, 64 * MIB),
        "hierarchical": st.sampled_from(["off", "leaders"]),
    }
)


def seconds(workload: Workload, cluster: Cluster, sends: Sends, **knobs: int | str) -> float:
    return Replicas(Simulator(workload, cluster), sends).step_seconds(knobs)


@given(SIZES, NAMES, KNOBS, st.floats(1.1, 50))
def test_more_bandwidth_is_never_slower(
    sizes: list[int], name: str, knobs: dict[str, int | str], factor: float
) -> None:
    workload, cluster = make_workload(sizes), make_cluster()
    faster = replace(cluster, bandwidth_bytes_per_second=1e9 * factor)
    now, then = (seconds(workload, each, ALGORITHMS[name], **knobs) for each in (cluster, faster))
    assert then <= now * (1 + 1e-9)


@given(SIZES, st.sampled_from(["bytegrad", "low_precision_decentralized"]), KNOBS)
def test_half_the_bytes_are_never_slower_on_a_slow_link(
    sizes: list[int], name: str, knobs: dict[str, int | str]
) -> None:
    slow = make_cluster(bandwidth=1e7)
    sends = ALGORITHMS[name]
    half = replace(sends, bits=sends.bits // 2)
    workload = make_workload(sizes)
    assert seconds(workload, slow, half, **knobs) <= seconds(workload, slow, sends, **knobs)


@given(SIZES, KNOBS)
def test_summed_gradients_are_the_jobs_own_steps(
    sizes: list[int], knobs: dict[str, int | str]
) -> None:
    simulator = Simulator(make_workload(sizes), make_cluster())
    own = Replicas(simulator, ALGORITHMS["gradient_allreduce"]).step_seconds(knobs)
    assert own == simulator.step_seconds(knobs)


def test_what_leaves_when_the_step_begins_is_hidden_and_what_leaves_at_its_end_is_not() -> None:
    # 50 tensors of 4 MiB, 2 ms each: 0.1 s of backward pass; alone 0.04 s of sending in 8 bits.
    workload, cluster = make_workload(), make_cluster(bandwidth=1e10)
    begin, end = (Sends(when, "ring", bits=8) for when in ("begin", "end"))
    early = seconds(workload, cluster, begin)
    late = seconds(workload, cluster, end)
    assert early < workload.compute_seconds * 1.1 < late


def test_async_waits_for_nothing_however_slow_the_link() -> None:
    workload = make_workload()
    simulator = Simulator(workload, make_cluster(bandwidth=1e5), contention=0.2)
    step = Replicas(simulator, ALGORITHMS["async"]).step_seconds({})
    assert workload.compute_seconds < step <= workload.compute_seconds * 1.2
    idle = Replicas(Simulator(workload, make_cluster(), contention=0.0), ALGORITHMS["async"])
    assert idle.step_seconds({}) == workload.compute_seconds


def test_what_cannot_be_is_refused() -> None:
    workload, cluster = make_workload(), make_cluster()
    with pytest.raises(ValueError, match="at another precision"):
        seconds(workload, cluster, ALGORITHMS["bytegrad"], wire_precision="bf16")
    with pytest.raises(ValueError, match="channels is 0"):
        seconds(workload, cluster, ALGORITHMS["bytegrad"], channels=0)


@pytest.mark.parametrize(
    ("model", "computing_ms", "stock_ms", "bytegrad_ms"),
    [("bert-base", 40.8, 392.7, 116.4), ("vgg16", 20.3, 476.6, 126.2)],
)
def test_two_gpus_at_10_gbit_take_about_as_long(
    model: str, computing_ms: float, stock_ms: float, bytegrad_ms: float
) -> None:
    """Against two H200 over a shaped link: reports/2026-11-algorithms.md."""
    usual = load(model)
    factor = computing_ms / 1e3 / usual.compute_seconds
    workload = replace(
        usual,
        forward_seconds=usual.forward_seconds * factor,
        ready_seconds=tuple(each * factor for each in usual.ready_seconds),
    )
    cluster = Cluster(2, 1, 10e9 / 8, 5e-5)
    stock = seconds(workload, cluster, Sends(), bucket_bytes=25 * MIB)
    packed = seconds(workload, cluster, ALGORITHMS["bytegrad"], bucket_bytes=25 * MIB)
    assert stock * 1e3 == pytest.approx(stock_ms, rel=0.15)
    assert packed * 1e3 == pytest.approx(bytegrad_ms, rel=0.15)
    assert stock / packed == pytest.approx(stock_ms / bytegrad_ms, rel=0.15)


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

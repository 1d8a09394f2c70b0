"""Steps under each algorithm."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_simulator import Cluster, Simulator, Workload
from bagua_simulator.algorithms import ALGORITHMS, Replicas, Sends
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

"""Against a real network: 2 hosts of 2 gloo ranks behind links that were shaped.

Medians of all-reduces, and of steps of torch's DistributedDataParallel with 25 million parameters
in 768 tensors, 0.3 s of forward and 1 s of backward slept; links of 1 Gbit/s and 200 Mbit/s, with
1 ms each way and without. Loopback, between the ranks of a host, was not measured by itself.
"""

from __future__ import annotations

import pytest

from bagua_simulator import Cluster, Simulator
from bagua_simulator.collectives import reduction
from tests.simulator.jobs import MIB, make_workload

LOOPBACK_BYTES_PER_SECOND, LOOPBACK_SECONDS = 2e9, 1e-4


def shaped(megabits: float, latency_seconds: float) -> Cluster:
    return Cluster(
        2, 2, megabits * 1e6 / 8, latency_seconds, LOOPBACK_BYTES_PER_SECOND, LOOPBACK_SECONDS
    )


@pytest.mark.parametrize(
    ("cluster", "size_bytes", "flat_ms", "leaders_ms"),
    [
        (shaped(1000, 1e-4), MIB, 12.6, 8.7),
        (shaped(1000, 1e-4), 64 * MIB, 849, 634),
        (shaped(200, 1e-3), MIB, 71.5, 51.9),
        (shaped(200, 1e-3), 64 * MIB, 4306, 3197),
    ],
)
def test_all_reduces_take_about_as_long(
    cluster: Cluster, size_bytes: int, flat_ms: float, leaders_ms: float
) -> None:
    for kind, measured_ms in (("off", flat_ms), ("leaders", leaders_ms)):
        seconds = sum(phase.alone_seconds for phase in reduction(cluster, kind, size_bytes))
        assert seconds * 1e3 == pytest.approx(measured_ms, rel=0.3)


@pytest.mark.parametrize(
    ("cluster", "percent_over_best"),
    [
        (shaped(1000, 1e-3), {5: 0, 25: 12, 100: 52}),  # 100: 59 and 44 in two runs
        (shaped(1000, 1e-4), {5: 6, 25: 14, 100: 49}),
        (shaped(200, 1e-3), {5: 0.5, 25: 2, 100: 15}),
    ],
)
def test_bucket_sizes_matter_as_much(cluster: Cluster, percent_over_best: dict[int, float]) -> None:
    workload = make_workload((32_552,) * 768, milliseconds=1000 / 768, forward_seconds=0.3)
    simulator = Simulator(workload, cluster, contention=0.0)  # sleeping is not slowed down

    def seconds(megabytes: int) -> float:
        return simulator.step_seconds({"bucket_bytes": megabytes * MIB})

    best = min(seconds(megabytes) for megabytes in (1, 5, 25, 100))
    for megabytes, measured in percent_over_best.items():
        assert 100 * (seconds(megabytes) / best - 1) == pytest.approx(measured, abs=8)

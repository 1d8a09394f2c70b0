"""Finding the best configuration."""

from __future__ import annotations

from itertools import product

import pytest

from bagua_simulator import Simulator
from bagua_simulator.sweep import find_best, sweep
from tests.simulator.jobs import MIB, make_cluster, make_workload

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def simulator() -> Simulator:
    sizes = [MIB // 2, MIB // 64] * 40
    return Simulator(make_workload(sizes, milliseconds=1.0), make_cluster(latency_seconds=2e-4))


def test_the_best_is_about_the_best_of_all(simulator: Simulator) -> None:
    everything = min(
        simulator.step_seconds(
            {
                "bucket_bytes": round(2 ** (half / 2)),
                "hierarchical": hierarchical,
                "channels": channels,
                "first_bucket_bytes": first,
                "last_bucket_bytes": last,
            }
        )
        for half, hierarchical, channels, first, last in product(
            range(32, 61), ("off", "leaders", "shards"), (1, 2, 4), (0, MIB, 4 * MIB),
            (0, MIB, 4 * MIB),
        )
    )  # fmt: skip
    assert find_best(simulator).step_seconds <= everything * 1.005


def test_a_sweep_covers_all_sizes_and_ways_of_reducing(simulator: Simulator) -> None:
    found = sweep(simulator)
    assert list(found.lines) == ["off", "leaders", "shards"]
    sizes = [point.configuration.number("bucket_bytes") for point in found.lines["off"]]
    assert (sizes[0], sizes[-1], len(sizes)) == (64 * 1024, 1024 * MIB, 29)
    assert found.speedup >= 1
    assert found.title == "small on 4 x 2 ranks, 8 Gbit/s, 200 us"

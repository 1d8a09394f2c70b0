"""What the reducer's benchmark says of what it measured, and that a re-cut can be timed."""

from __future__ import annotations

import pytest
from models import GradientList
from recut import hooked, recut
from reducer import COMPILED_GOALS, GOALS, Cell
from stepping import list_step
from swap import Swap, swap_seconds, tensor_cost

from bagua_client import Configuration, DistributedDataParallel
from tests.ranks import RankPool


def cell(way, ours, goals=GOALS):
    found = {"model": "resnet50", "bucket_mib": 25, "way": way, "stock": [1.0] * len(ours)}
    return Cell.of({**found, "ours": ours}, goals)


@pytest.mark.parametrize(
    ("way", "ours", "goals", "is_met"),
    [
        pytest.param("off", [0.99, 1.03] * 10, GOALS, True, id="untuned, as torch's but for noise"),
        pytest.param("off", [1.02] * 20, GOALS, False, id="untuned, slower beyond noise"),
        pytest.param("hook", [1.01] * 20, GOALS, True, id="by our hook, at the goal"),
        pytest.param("hook", [1.015] * 20, GOALS, False, id="by our hook, slower"),
        pytest.param("hook", [1.015] * 20, COMPILED_GOALS, True, id="compiled, by our hook"),
    ],
)
def test_a_cell_meets_its_goal_or_not(way, ours, goals, is_met):
    assert cell(way, ours, goals).is_met == is_met


def test_the_cost_of_a_tensor_is_that_of_the_small_ones():
    small = [Swap(f"{n} x 4 KiB", n, ms=2 + 0.01 * n, deviation_ms=0.1) for n in (10, 100, 1000)]
    assert tensor_cost([*small, Swap("bert", 199, 80.0, 1.0)]) == pytest.approx((2.0, 10.0))
    assert small[1].goal_ms == 7.0


def _swap() -> tuple[int, float, list[int]]:
    wrapped = DistributedDataParallel(GradientList([(64, 64)] * 8))
    tunable = hooked(wrapped)
    step = list_step(tunable.communicator.device)
    for _ in range(3):
        step(wrapped)
    steps = recut(wrapped, Configuration(bucket_bytes=2 * 64 * 64 * 4), lambda: step(wrapped))
    buckets = [len(bucket) for bucket in tunable.layout.partition]
    return steps, swap_seconds(wrapped, 1, step), buckets


def test_a_re_cut_takes_one_step_and_some_time():
    pool = RankPool((2,))
    try:
        for steps, seconds, buckets in pool.run(_swap):
            assert steps == 1
            assert 0 < seconds < 60
            assert buckets == [2, 2, 2, 2]
    finally:
        pool.close()

"""What the reducer's benchmark says of what it measured, and that it re-cuts in one step."""

from __future__ import annotations

import pytest

from bagua_client import Configuration, DistributedDataParallel
from benchmarks.reducer import COMPILED_GOALS, GOALS, Cell, list_step
from benchmarks.support.models import GradientList
from benchmarks.support.recut import hooked, recut
from tests.ranks import RankPool

pytestmark = pytest.mark.slow


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


def _recut() -> tuple[int, list[int]]:
    wrapped = DistributedDataParallel(GradientList([(64, 64)] * 8))
    tunable = hooked(wrapped)
    step = list_step(tunable.communicator.device)
    for _ in range(3):
        step(wrapped)
    steps = recut(wrapped, Configuration(bucket_bytes=2 * 64 * 64 * 4), lambda: step(wrapped))
    buckets = [len(bucket) for bucket in tunable.layout.partition]
    return steps, buckets


def test_a_re_cut_takes_one_step():
    pool = RankPool((2,))
    try:
        for steps, buckets in pool.run(_recut):
            assert steps == 1
            assert buckets == [2, 2, 2, 2]
    finally:
        pool.close()

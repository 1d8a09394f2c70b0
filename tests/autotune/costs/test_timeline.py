from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_autotune.costs import Cost, timeline
from bagua_autotune.costs.timeline import Queues, find_paths, latencies
from bagua_client.reducer import carrier
from bagua_simulator import collectives
from tests.autotune.costs.profiled import ends

SIZES = st.integers(0, 1000) | st.integers(0, 20).map(lambda parts: parts * 2**18)
BUCKETS = st.lists(st.tuples(st.floats(0, 100), SIZES), min_size=1, max_size=12)
COSTS = st.builds(Cost, st.floats(0, 10), st.floats(0, 1), st.floats(0, 1))
CHANNELS = st.sampled_from([1, 2, 4])


def one_by_one(buckets: list[tuple[float, int]], cost: Cost, channels: int) -> float:
    """The network takes bucket after bucket; what is not on it goes on beside the next ones."""
    free, last = 0.0, 0.0
    for ready, size in sorted(buckets):
        share = min(max(size // 2**19, 1), channels) / channels
        free = max(ready, free) + cost.latency_seconds * share + cost.seconds_per_byte * size
        beside = cost.latency_seconds * (1 - share) + cost.chain_seconds_per_byte * size
        last = max(last, free + beside)
    return last


def table(steps: list[list[tuple[float, int]]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ready times, sizes, and where there is a bucket."""
    shape = (len(steps), max(map(len, steps)))
    ready, sizes, is_bucket = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for row, step in enumerate(steps):
        ready[row, : len(step)], sizes[row, : len(step)] = zip(*sorted(step), strict=True)
        is_bucket[row, : len(step)] = 1
    return ready, sizes, is_bucket


@given(st.lists(BUCKETS, min_size=1, max_size=5), COSTS, CHANNELS)
def test_all_layouts_at_once_end_as_each_does_bucket_by_bucket(
    steps: list[list[tuple[float, int]]], cost: Cost, channels: int
) -> None:
    found = ends(*table(steps), cost, channels)
    assert found.tolist() == pytest.approx([one_by_one(step, cost, channels) for step in steps])


@given(st.lists(BUCKETS, min_size=1, max_size=5), st.lists(COSTS, min_size=2, max_size=4), CHANNELS)
def test_the_paths_that_are_left_are_enough_for_every_cost_between_the_bounds(
    steps: list[list[tuple[float, int]]], likely: list[Cost], channels: int
) -> None:
    ready, sizes, is_bucket = table(steps)
    costs = np.repeat(np.array([cost.parts for cost in likely]).T[:, :, None], len(steps), axis=2)
    queues = Queues(ready, sizes, is_bucket.astype(bool), np.full(len(steps), float(channels)))
    paths = find_paths(queues, costs.min(axis=1), costs.max(axis=1))
    for place, cost in enumerate(likely):
        found = paths.longest(paths.seconds(costs[:, place]))
        assert found.tolist() == pytest.approx([one_by_one(step, cost, channels) for step in steps])


@given(BUCKETS, COSTS)
def test_more_channels_never_make_a_step_longer_nor_faster_than_the_link(
    step: list[tuple[float, int]], cost: Cost
) -> None:
    one, two, four = (float(ends(*table([step]), cost, channels)[0]) for channels in (1, 2, 4))
    assert four <= two * (1 + 1e-9)
    assert two <= one * (1 + 1e-9)
    assert four >= cost.seconds_per_byte * sum(size for _, size in step) * (1 - 1e-9)


@pytest.mark.parametrize("channels", [1, 2, 4])
@pytest.mark.parametrize("size", [0, 2**19, 2**20, 2**23])
def test_a_queue_takes_as_many_latencies_as_the_timeline_says(size: int, channels: int) -> None:
    queue = [(0.0, size)] * 6
    expected = ends(*table([queue]), Cost(3.0, 0.0), channels)[0]
    assert 3.0 * latencies(np.full(6, float(size)), channels) == pytest.approx(expected)


def test_parts_are_those_of_the_client_and_of_the_simulator() -> None:
    assert carrier.SMALLEST_PART_BYTES == timeline.SMALLEST_PART_BYTES
    assert collectives.SMALLEST_PART_BYTES == timeline.SMALLEST_PART_BYTES
    for size in (0, 2**19 - 1, 2**19, 2**20 - 1, 2**20, 2**30):
        for channels in (1, 2, 16):
            found = timeline.parts(np.array([float(size)]), channels)
            assert collectives.parts(size, channels) == found[0]

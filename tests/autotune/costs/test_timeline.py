from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_autotune.costs.timeline import ends

SECONDS = st.floats(0, 100)
STEPS = st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=12)


def one_by_one(buckets: list[tuple[float, float]], channels: int) -> float:
    free = [0.0] * channels
    for place, (ready, duration) in enumerate(sorted(buckets)):
        channel = place % channels
        free[channel] = max(ready, free[channel]) + duration
    return max(free)


@given(st.lists(STEPS, min_size=1, max_size=5), st.sampled_from([1, 2, 3, 4]))
def test_all_layouts_at_once_end_as_each_does_bucket_by_bucket(
    steps: list[list[tuple[float, float]]], channels: int
) -> None:
    shape = (len(steps), max(map(len, steps)))
    ready, durations = np.zeros(shape), np.zeros(shape)
    for row, step in enumerate(steps):
        ready[row, : len(step)] = sorted(ready for ready, _ in step)
        durations[row, : len(step)] = [duration for _, duration in sorted(step)]
    found = ends(ready, durations, channels)
    assert found.tolist() == pytest.approx([one_by_one(step, channels) for step in steps])

"""When gradients would be ready if no bucket were launched."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_autotune.costs import Kind
from bagua_autotune.costs.model import USUAL_LAUNCH_SECONDS, fit_computing
from bagua_wire.profile import BucketTiming, Profile

FLAT, CHAIN = Kind(), Kind("leaders")
TENSORS = 400


def step(buckets: int, launch_seconds: float, kind: Kind = FLAT) -> tuple[Kind, Profile]:
    """A step of 0.1 s for 400 tensors; launching each bucket holds up what follows."""
    alone = 0.1 * np.arange(1, TENSORS + 1) / TENSORS
    each = TENSORS // buckets
    ready = alone + launch_seconds * kind.operations * (np.arange(TENSORS) // each)
    started = ready[each - 1 :: each]
    timings = [
        BucketTiming(bytes=10, started_seconds=at, ended_seconds=at + 0.001)
        for at in started.tolist()
    ]
    profile = Profile(
        step=1,
        step_seconds=float(ready[-1]) + 0.001,
        ready_seconds=tuple(ready.tolist()),
        buckets=tuple(timings),
    )
    return kind, profile


@pytest.mark.parametrize("launch_seconds", [0.0, 2e-5, 1e-4])
@pytest.mark.parametrize("kind", [FLAT, CHAIN])
def test_what_launches_add_is_found_and_taken_out(kind: Kind, launch_seconds: float) -> None:
    steps = [step(buckets, launch_seconds, kind) for buckets in (2, 200) for _ in range(10)]
    found = fit_computing(steps)
    assert found is not None
    assert found.launch_seconds == pytest.approx(launch_seconds, rel=0.15, abs=3e-6)
    truth = 0.1 * np.arange(1, TENSORS + 1) / TENSORS
    assert found.ready_seconds == pytest.approx(truth, abs=0.004)


def test_from_one_layout_it_is_what_is_usual() -> None:
    found = fit_computing([step(20, 0.0)] * 3)
    assert found is not None
    assert found.launch_seconds == pytest.approx(USUAL_LAUNCH_SECONDS)
    assert fit_computing([]) is None


MOMENTS = st.sampled_from([0.0, 5e-324, 1e-9, 0.1, 1e9]) | st.floats(0, 1e9)


@given(st.data(), st.integers(1, 8))
def test_odd_steps_give_times_that_are_finite_and_ascend(data: st.DataObject, count: int) -> None:
    bucket = st.builds(
        BucketTiming, bytes=st.just(1), started_seconds=MOMENTS, ended_seconds=MOMENTS
    )
    profiles = st.builds(
        Profile,
        step=st.just(0),
        step_seconds=MOMENTS,
        ready_seconds=st.lists(MOMENTS, min_size=count, max_size=count).map(tuple),
        buckets=st.lists(bucket, min_size=1, max_size=8).map(tuple),
    )
    steps = data.draw(
        st.lists(st.tuples(st.sampled_from([FLAT, CHAIN]), profiles), min_size=1, max_size=4)
    )
    found = fit_computing(steps)
    assert found is not None
    assert math.isfinite(found.launch_seconds)
    assert found.launch_seconds >= 0
    assert np.isfinite(found.ready_seconds).all()
    assert (np.diff(found.ready_seconds) >= 0).all()
    assert found.ready_seconds[0] >= 0

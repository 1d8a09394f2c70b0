"""The predictions' buckets are the very ones that the ranks will make; and a step's time line."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_autotune.costs import Cost, Kind, Layouts, kinds_of
from bagua_autotune.costs.layouts import SMALLEST_PART_BYTES, Queues, find_paths, latencies, parts
from bagua_autotune.costs.model import USUAL_LAUNCH_SECONDS, fit_computing
from bagua_autotune.model.knobs import Categorical, LogInteger, Space
from bagua_client.configuration import Configuration as ClientConfiguration
from bagua_client.layout import TensorSpec, plan
from bagua_client.reducer import carrier
from bagua_simulator import cluster
from bagua_wire.configuration import Configuration
from bagua_wire.cutting import Tensor
from bagua_wire.profile import BucketTiming, Profile
from tests.autotune.costs.profiled import ends
from tests.autotune.support import present

Kinds = list[tuple[int, str]]
KINDS = st.lists(
    st.tuples(st.integers(0, 60), st.sampled_from(["float32", "bfloat16", "uint8"])),
    min_size=1,
    max_size=40,
)
EDGES = st.integers(0, 200)


def tensors(kinds: Kinds) -> list[Tensor]:
    return [
        Tensor(name=str(place), elements=size, bytes=size, dtype=dtype, group=f"{dtype}/cpu#0")
        for place, (size, dtype) in enumerate(kinds)
    ]


@st.composite
def configurations(draw: st.DrawFn, kinds: Kinds) -> Configuration:
    counts = [1]
    for before, after in pairwise(kinds):
        if before[1] == after[1] and draw(st.booleans()):
            counts[-1] += 1
        else:
            counts.append(1)
    return Configuration(
        bucket_bytes=draw(st.integers(1, 300)),
        first_bucket_bytes=draw(EDGES),
        last_bucket_bytes=draw(EDGES),
        buckets=tuple(counts) if draw(st.booleans()) else (),
        channels=draw(st.sampled_from([1, 2, 4])),
    )


def made_by_client(kinds: Kinds, configuration: Configuration) -> list[tuple[int, int]]:
    """For each bucket of the client its bytes and the position of its last tensor."""
    specs = [
        TensorSpec(str(i), (size,), 1, dtype, "cpu#0") for i, (size, dtype) in enumerate(kinds)
    ]
    layout = plan(specs, range(len(specs)), ClientConfiguration.from_json(configuration))
    return [(sum(specs[i].bytes for i in bucket), bucket[-1]) for bucket in layout.partition]


@given(st.data(), KINDS)
def test_the_client_makes_the_buckets_that_are_predicted(data: st.DataObject, kinds: Kinds) -> None:
    configuration = data.draw(configurations(kinds))
    layout = Layouts(tensors(kinds)).cut(configuration)
    found = list(zip(layout.sizes_bytes.tolist(), layout.last.tolist(), strict=True))
    assert found == made_by_client(kinds, configuration)


@given(st.data(), KINDS)
def test_the_layouts_of_many_configurations_stand_side_by_side(
    data: st.DataObject, kinds: Kinds
) -> None:
    chosen = data.draw(st.lists(configurations(kinds), min_size=1, max_size=6))
    table = Layouts(tensors(kinds)).table(chosen)
    for place, configuration in enumerate(chosen):
        row = table.row_of[place]
        there = table.is_bucket[row]
        found = zip(table.sizes_bytes[row][there], table.last[row][there], strict=True)
        assert [(int(size), int(last)) for size, last in found] == made_by_client(
            kinds, configuration
        )
        assert not table.sizes_bytes[row][~there].any()
        # What is there stands first.
        assert (np.diff(there.astype(int)) <= 0).all()


def test_knobs_that_a_job_does_not_have_are_at_their_defaults() -> None:
    kinds: Kinds = [(10, "float32")] * 10
    layout = Layouts(tensors(kinds)).cut(Configuration(bucket_bytes=40))
    assert layout.sizes_bytes.tolist() == [40, 40, 20]
    assert layout.last.tolist() == [3, 7, 9]


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
    assert carrier.SMALLEST_PART_BYTES == SMALLEST_PART_BYTES
    assert cluster.SMALLEST_PART_BYTES == SMALLEST_PART_BYTES
    for size in (0, 2**19 - 1, 2**19, 2**20 - 1, 2**20, 2**30):
        for channels in (1, 2, 16):
            found = parts(np.array([float(size)]), channels)
            assert cluster.parts(size, channels) == found[0]


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
    found = present(fit_computing(steps))
    assert found.launch_seconds == pytest.approx(launch_seconds, rel=0.15, abs=3e-6)
    truth = 0.1 * np.arange(1, TENSORS + 1) / TENSORS
    assert found.ready_seconds == pytest.approx(truth, abs=0.004)


def test_from_one_layout_it_is_what_is_usual() -> None:
    found = present(fit_computing([step(20, 0.0)] * 3))
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
    found = present(fit_computing(steps))
    assert math.isfinite(found.launch_seconds)
    assert found.launch_seconds >= 0
    assert np.isfinite(found.ready_seconds).all()
    assert (np.diff(found.ready_seconds) >= 0).all()
    assert found.ready_seconds[0] >= 0


VALUES = st.text(max_size=20) | st.integers(0, 2**53)


@given(VALUES, VALUES, VALUES)
def test_a_kind_comes_out_of_the_store_as_it_went_in(
    hierarchical: int | str, channels: int | str, wire_precision: int | str
) -> None:
    kind = Kind(hierarchical, channels, wire_precision)
    assert Kind.parse(kind.key) == kind


SPACE: Space = {
    "bucket_bytes": LogInteger(low=65536, high=2**30),
    "hierarchical": Categorical(values=("off", "leaders")),
    "channels": Categorical(values=(1, 2)),
}


def test_a_space_has_every_kind_that_its_knobs_make_each_once() -> None:
    default = Configuration(bucket_bytes=65536, hierarchical="off", channels=2)
    kinds = kinds_of(SPACE, [default])
    assert len(kinds) == len(set(kinds))
    assert set(kinds) == {Kind(way, count) for way in ("off", "leaders") for count in (1, 2)}


def test_a_configuration_from_outside_the_space_adds_its_kind() -> None:
    other = Configuration(bucket_bytes=65536, hierarchical="shards", channels=4)
    assert Kind("shards", 4) in kinds_of(SPACE, [Configuration(bucket_bytes=65536), other])

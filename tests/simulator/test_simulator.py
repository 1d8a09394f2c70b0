"""Steps of whole configurations; and the event loop: what holds for every step, whatever its
messages."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagua_autotune.model.knobs import SPACE, check_configuration
from bagua_simulator import Simulator, Workload
from bagua_simulator.cluster import Phase, reduction
from bagua_simulator.simulator import LAUNCH_SECONDS, Layouts
from bagua_simulator.step import Message, Step, Trace
from tests.simulator.jobs import CONFIGURATIONS, MIB, SIZES, Knobs, make_cluster, make_workload

pytestmark = pytest.mark.slow


SIMULATOR = Simulator(make_workload(), make_cluster())


@given(SIZES, CONFIGURATIONS)
def test_a_step_lasts_at_least_its_computing_and_its_sending(
    sizes: list[int], knobs: Knobs
) -> None:
    simulator = Simulator(make_workload(sizes), make_cluster())
    workload = simulator.workload
    wire = 1.0 if knobs["wire_precision"] == "as_is" else 0.5
    sent = 4 * sum(sizes) * wire * 2 * (4 - 1) / 4  # no way of reducing crosses a link with less
    seconds = simulator.step_seconds(knobs)
    assert seconds >= workload.compute_seconds
    assert seconds >= workload.forward_seconds + sent / 1e9


def test_one_bucket_is_the_last_gradient_and_then_one_reduction() -> None:
    workload = SIMULATOR.workload
    size = sum(tensor.bytes for tensor in workload.tensors)
    (phase,) = reduction(SIMULATOR.cluster, "off", size)
    assert SIMULATOR.step_seconds({"bucket_bytes": 2**30}) == pytest.approx(
        workload.compute_seconds + LAUNCH_SECONDS + phase.alone_seconds
    )


def best_size(simulator: Simulator) -> int:
    sizes = [2**power for power in range(16, 31)]
    return min(sizes, key=lambda size: simulator.step_seconds({"bucket_bytes": size}))


def test_far_nodes_want_large_buckets_and_near_ones_small() -> None:
    workload = make_workload(sizes=(MIB // 16,) * 200, milliseconds=0.4)
    far = Simulator(workload, make_cluster(latency_seconds=0.1))
    near = Simulator(workload, make_cluster(latency_seconds=1e-6))
    assert best_size(far) >= 64 * MIB
    assert best_size(near) <= 4 * MIB


def test_a_bucket_list_that_a_size_would_make_takes_the_same_time() -> None:
    by_size = SIMULATOR.step_seconds({"bucket_bytes": 40 * MIB})
    assert SIMULATOR.step_seconds({"buckets": (10,) * 5}) == by_size


def test_half_the_bytes_help_where_the_network_is_slow() -> None:
    knobs = {"bucket_bytes": 8 * MIB}
    whole, half = (
        SIMULATOR.step_seconds({**knobs, "wire_precision": p}) for p in ("as_is", "bf16")
    )
    assert half < whole


def test_the_default_is_in_the_space() -> None:
    check_configuration(SIMULATOR.default, SPACE.validate_python(SIMULATOR.space))
    flat = Simulator(make_workload(), make_cluster(nodes=1))
    assert flat.space["hierarchical"]["values"] == ("off",)


@pytest.mark.parametrize(
    "knobs", [{"hierarchical": "on"}, {"channels": 0}, {"wire_precision": "int1"}]
)
def test_a_value_that_no_knob_has_is_refused_by_name(knobs: Knobs) -> None:
    with pytest.raises(ValueError, match=next(iter(knobs))):
        SIMULATOR.step_seconds(knobs)


@given(CONFIGURATIONS, st.sampled_from([0.0, 0.05]), st.integers(0, 2**32))
def test_a_profile_is_possible(knobs: Knobs, noise: float, seed: int) -> None:
    profile = SIMULATOR.profile(knobs, 7, np.random.default_rng(seed), noise)
    assert profile.step == 7
    assert all(earlier <= later for earlier, later in pairwise(profile.ready_seconds))
    assert sum(bucket.bytes for bucket in profile.buckets) == 50 * 4 * MIB
    assert profile.step_seconds >= max(bucket.ended_seconds for bucket in profile.buckets) - 1e-12
    for bucket in profile.buckets:
        assert profile.ready_seconds[0] <= bucket.started_seconds < bucket.ended_seconds


@given(CONFIGURATIONS)
@settings(max_examples=20)
def test_a_quiet_profile_is_the_step_itself(knobs: Knobs) -> None:
    profile = SIMULATOR.profile(knobs)
    assert profile.step_seconds == pytest.approx(SIMULATOR.step_seconds(knobs))
    buckets = Layouts(SIMULATOR.workload.tensors).cut(knobs)
    for bucket, timing in zip(buckets, profile.buckets, strict=True):
        assert timing.started_seconds >= profile.ready_seconds[bucket.last]


def test_observed_steps_scatter_about_the_truth_and_some_are_late() -> None:
    generator, knobs = np.random.default_rng(0), {"bucket_bytes": 8 * MIB}
    truth = SIMULATOR.step_seconds(knobs)
    steps = [SIMULATOR.observe(knobs, generator, 0.05, 0.03) for _ in range(2000)]
    assert {len(step) for step in steps} == {SIMULATOR.cluster.world_size}
    slowest = [max(step) / truth for step in steps]
    assert median(slowest) == pytest.approx(1.0, abs=0.01)
    late = sum(ratio > 1.25 for ratio in slowest) / len(slowest)
    assert 0.01 < late < 0.04
    quiet = SIMULATOR.observe(knobs, generator, noise=0.0, straggler_probability=0.0)
    assert max(quiet) == truth


def test_a_workload_that_makes_no_sense_is_refused() -> None:
    good = make_workload()
    with pytest.raises(ValueError, match="ready_seconds must ascend"):
        replace(good, ready_seconds=good.ready_seconds[::-1])
    with pytest.raises(ValueError, match="50 tensors and 1 ready_seconds"):
        replace(good, ready_seconds=(1.0,))
    with pytest.raises(ValueError, match="has no tensors"):
        Workload("none", (), 0.0, ())
    with pytest.raises(ValueError, match="bandwidth"):
        make_cluster(bandwidth=0.0)


BANDWIDTH = 1e9
CLUSTER = make_cluster(bandwidth=BANDWIDTH)
PHASES = st.builds(
    Phase,
    link=st.just("network"),
    seconds=st.floats(0, 1e-3),
    bytes=st.floats(1e3, 1e8),
    most=st.floats(1e8, BANDWIDTH),
)
MESSAGES = st.lists(
    st.builds(
        Message,
        ready_seconds=st.floats(0, 1),
        launch_seconds=st.floats(0, 1e-4),
        parts=st.lists(
            st.lists(PHASES, min_size=1, max_size=3).map(tuple), min_size=1, max_size=3
        ).map(tuple),
    ),
    min_size=1,
    max_size=15,
).map(lambda messages: sorted(messages, key=lambda message: message.ready_seconds))


def run(messages: list[Message], channels: int = 1, contention: float = 0.1) -> Trace:
    return Step(messages, 1.0, channels, CLUSTER, contention).run()


@given(MESSAGES, st.sampled_from([1, 2, 4]))
def test_no_message_is_faster_than_alone_and_none_is_lost(
    messages: list[Message], channels: int
) -> None:
    trace = run(messages, channels)
    for message, started, ended in zip(
        messages, trace.started_seconds, trace.ended_seconds, strict=True
    ):
        alone = max(sum(phase.alone_seconds for phase in part) for part in message.parts)
        assert started >= message.ready_seconds
        assert ended - started >= alone * (1 - 1e-9)
    assert trace.end_seconds == pytest.approx(max(1.0, *trace.ended_seconds, trace.computed[-1][0]))


@given(MESSAGES, st.sampled_from([1, 2, 4]))
def test_channels_together_never_send_more_than_the_link_carries(
    messages: list[Message], channels: int
) -> None:
    trace = run(messages, channels)
    parts = [part for message in messages for part in message.parts]
    sent = sum(phase.bytes for part in parts for phase in part)
    under_way = max(trace.ended_seconds) - min(trace.started_seconds)
    assert sent <= BANDWIDTH * under_way * (1 + 1e-9)


@given(MESSAGES)
def test_a_channel_keeps_the_order(messages: list[Message]) -> None:
    alike = [replace(message, parts=(message.parts[0][:1],)) for message in messages]
    ended = run(alike).ended_seconds
    assert ended == sorted(ended)


@given(MESSAGES)
def test_computing_is_slowed_by_communicating_only(messages: list[Message]) -> None:
    undisturbed = run(messages, contention=0.0).computed[-1][0]
    launching = sum(message.launch_seconds for message in messages)
    assert undisturbed == pytest.approx(1.0 + launching)
    assert run(messages, contention=0.5).computed[-1][0] >= undisturbed * (1 - 1e-9)


CARRIED = CLUSTER.capacity("network", 2)
WHOLE = Phase("network", 0.0, 1e9, BANDWIDTH)


@pytest.mark.parametrize(
    ("phases", "ended"),
    [
        ((WHOLE, WHOLE), [2e9 / CARRIED] * 2),
        # The light one takes its half at the double rate, and leaves more of the link to the other.
        ((replace(WHOLE, weight=0.5), WHOLE), [1e9 / min(BANDWIDTH, CARRIED), 1.5e9 / CARRIED]),
        # What a slow one leaves goes to the other.
        (
            (Phase("network", 0.0, 1e8, 1e8), Phase("network", 0.0, 8e8, BANDWIDTH)),
            [1.0, 8e8 / (CARRIED - 1e8)],
        ),
    ],
)
def test_two_flows_share_a_link(phases: tuple[Phase, Phase], ended: list[float]) -> None:
    messages = [Message(0.0, 0.0, ((each,),)) for each in phases]
    found = run(messages, channels=2, contention=0.0).ended_seconds
    assert found == pytest.approx(ended, rel=0.01)


def test_phases_of_different_buckets_overlap_on_one_channel() -> None:
    inside = Phase("inside", 0.1, 0.0, 1.0)
    across = Phase("network", 0.1, 0.0, 1.0)
    trace = run([Message(0.0, 0.0, ((inside, across),))] * 3, contention=0.0)
    assert trace.ended_seconds == pytest.approx([0.2, 0.3, 0.4])


def test_parts_of_one_message_travel_at_once_each_on_its_channel() -> None:
    slow = Phase("network", 0.0, 1e8, 1e8)
    alone = run([Message(0.0, 0.0, ((slow,),))], contention=0.0).ended_seconds
    parts = Message(0.0, 0.0, ((Phase("network", 0.0, 5e7, 1e8),),) * 2)
    assert alone == pytest.approx([1.0])
    assert run([parts], channels=2, contention=0.0).ended_seconds == pytest.approx([0.5])
    # On one channel they are no faster than the whole.
    assert run([parts], channels=1, contention=0.0).ended_seconds == pytest.approx(alone)
    # The next message takes the channel after the last part's.
    third = Message(0.0, 0.0, ((slow,),))
    assert run([parts, third], channels=4, contention=0.0).ended_seconds == pytest.approx([0.5, 1])

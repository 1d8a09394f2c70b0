"""The event loop: what holds for every step, whatever its messages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_simulator.collectives import Phase
from bagua_simulator.step import Message, Step, Trace
from tests.simulator.jobs import make_cluster

pytestmark = pytest.mark.slow

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


def test_two_flows_share_a_link_equally() -> None:
    phase = Phase("network", 0.0, 1e9, BANDWIDTH)
    together = run([Message(0.0, 0.0, ((phase,),))] * 2, channels=2, contention=0.0)
    seconds = 2e9 / CLUSTER.capacity("network", 2)
    assert together.ended_seconds == pytest.approx([seconds, seconds])


def test_a_flow_that_weighs_less_leaves_more_of_the_link_to_others() -> None:
    light, whole = (
        Phase("network", 0.0, 1e9, BANDWIDTH, weight=0.5),
        Phase("network", 0.0, 1e9, 1e9),
    )
    messages = [Message(0.0, 0.0, ((each,),)) for each in (light, whole)]
    carried = CLUSTER.capacity("network", 2)
    ended = run(messages, channels=2, contention=0.0).ended_seconds
    first = 1e9 / min(BANDWIDTH, carried)  # the light one takes its half at the double rate
    assert ended[0] == pytest.approx(first)
    assert ended[1] == pytest.approx(1.5e9 / carried, rel=0.01)


def test_what_a_slow_flow_leaves_goes_to_the_other() -> None:
    slow, fast = Phase("network", 0.0, 1e8, 1e8), Phase("network", 0.0, 8e8, BANDWIDTH)
    messages = [Message(0.0, 0.0, ((slow,),)), Message(0.0, 0.0, ((fast,),))]
    ended = run(messages, channels=2, contention=0.0).ended_seconds
    assert ended == pytest.approx([1.0, 8e8 / (CLUSTER.capacity("network", 2) - 1e8)])


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

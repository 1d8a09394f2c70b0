"""What passes from the training thread to the reporter."""

from __future__ import annotations

from typing import Any

from bagua_client.measuring.clock import CpuClock
from bagua_client.measuring.profiler import Recording
from bagua_client.reporter.inbox import (
    LARGEST_INBOX,
    LARGEST_INBOX_BYTES,
    Event,
    GatheredTimes,
    Inbox,
    RankTimes,
)
from bagua_client.tunable.tunable import Timeline


def test_messages_come_out_in_order_and_none_when_there_is_none() -> None:
    box = Inbox()
    messages = [Event("switched", index, index, "") for index in range(3)]
    for message in messages:
        box.put(message)
    assert [box.take(0.0) for _ in range(4)] == [*messages, None]


def test_with_the_service_away_what_is_old_is_dropped_but_no_event() -> None:
    box = Inbox()
    event = Event("disagreement", 3, 10, "rank 1 disagreed")
    box.put(Recording(3, 9, CpuClock(), Timeline(lambda: 0.0), 0.0, 0.0, []))
    box.put(event)
    for step in range(3 * LARGEST_INBOX):
        box.put(GatheredTimes(0, [RankTimes(step, [0.1])]))
    first, *left = _all_of(box)
    assert first == event
    assert len(left) == LARGEST_INBOX - 1
    assert left[-1] == GatheredTimes(0, [RankTimes(3 * LARGEST_INBOX - 1, [0.1])])
    assert box.take_dropped() == 2 * LARGEST_INBOX + 2
    assert box.take_dropped() == 0


def test_of_thousands_of_ranks_less_is_kept() -> None:
    """8,192 ranks tell 32 steps in 16 MB; 512 such messages would take 8 GB."""
    box = Inbox()
    event = Event("switched", 3, 10, "")
    box.put(event)
    for step in range(0, 3200, 32):
        box.put(GatheredTimes(0, [RankTimes(step, [0.1] * 32, [0.1] * 32)] * 8192))
    event_left, *left = _all_of(box)
    assert event_left == event
    assert len(left) * 8192 * 64 * 32 <= max(LARGEST_INBOX_BYTES, 8192 * 64 * 32)
    (last,) = left
    assert isinstance(last, GatheredTimes)
    assert last.by_rank[0].first_step == 3168


def test_of_very_many_events_the_newest_are_kept_and_the_end() -> None:
    box = Inbox()
    box.put(Event("ended", None, 0, ""))
    for step in range(2 * LARGEST_INBOX):
        box.put(Event("drift", None, step, ""))
    ended, *drifts = _all_of(box)
    assert ended == Event("ended", None, 0, "")
    assert len(drifts) == LARGEST_INBOX - 1
    assert drifts[-1] == Event("drift", None, 2 * LARGEST_INBOX - 1, "")


def _all_of(box: Inbox) -> list[Any]:
    found = []
    while (message := box.take(0.0)) is not None:
        found.append(message)
    return found

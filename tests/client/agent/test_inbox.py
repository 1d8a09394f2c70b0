"""What passes from the training thread to the reporter."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bagua_client.agent.clock import CpuClock
from bagua_client.agent.inbox import LARGEST_INBOX, Event, Inbox, RankTimes, Samples, StepTable
from bagua_client.agent.profiler import Recording
from bagua_client.reducer.timeline import Timeline
from bagua_client.service_client import StepTimes


def test_messages_come_out_in_order_and_none_when_there_is_none() -> None:
    inbox = Inbox()
    messages = [Event("switched", index, index, "") for index in range(3)]
    for message in messages:
        inbox.put(message)
    assert [inbox.take(0.0) for _ in range(4)] == [*messages, None]


def test_with_the_service_away_what_is_old_is_dropped_but_no_event() -> None:
    inbox = Inbox()
    event = Event("disagreement", 3, 10, "rank 1 disagreed")
    inbox.put(Recording(3, 9, CpuClock(), Timeline(lambda: 0.0), 0.0, 0.0, []))
    inbox.put(event)
    for step in range(3 * LARGEST_INBOX):
        inbox.put(Samples(0, [RankTimes(step, [0.1])]))
    assert inbox.take(0.0) == event
    left = []
    while (message := inbox.take(0.0)) is not None:
        left.append(message)
    assert len(left) == LARGEST_INBOX - 1
    assert left[-1] == Samples(0, [RankTimes(3 * LARGEST_INBOX - 1, [0.1])])


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=20))
def test_steps_are_complete_once_both_ranks_knew_them_and_come_once(
    batches: list[tuple[int, int]],
) -> None:
    """However many steps each rank knows at each report (CUDA events come late)."""
    table = StepTable(2)
    known, found = [0, 0], []
    for sizes in batches:
        by_rank = []
        for rank, size in enumerate(sizes):
            seconds = [1.0 + rank + step for step in range(known[rank], known[rank] + size)]
            by_rank.append(RankTimes(known[rank], seconds))
            known[rank] += size
        found += table.add(Samples(0, by_rank))
    assert found == [StepTimes(step, [1.0 + step, 2.0 + step]) for step in range(min(known))]


def _add(table: StepTable, trial: int, *by_rank: tuple[Any, ...]) -> list[StepTimes]:
    return table.add(Samples(trial, [RankTimes(*times) for times in by_rank]))


def test_a_dropped_message_costs_the_steps_in_it_and_no_others() -> None:
    """Rank 1 lags behind, so what it said of step 5 was in a message that rank 0's was not."""
    table = StepTable(2)
    assert _add(table, 0, (5, [0.5]), (4, [0.4])) == []
    assert _add(table, 0, (7, [0.7, 0.8]), (7, [0.7])) == [StepTimes(7, [0.7, 0.7])]
    assert _add(table, 0, (9, [0.9]), (8, [0.8, 0.9])) == [
        StepTimes(8, [0.8, 0.8]),
        StepTimes(9, [0.9, 0.9]),
    ]


def test_what_is_left_of_a_trial_is_forgotten_with_the_next() -> None:
    table = StepTable(2)
    assert _add(table, 0, (1, [0.1, 0.1]), (1, [0.1])) == [StepTimes(1, [0.1, 0.1])]
    assert _add(table, 1, (9, [0.5]), (9, [0.6])) == [StepTimes(9, [0.5, 0.6])]


def test_computing_times_go_with_a_step_if_all_ranks_knew_theirs() -> None:
    table = StepTable(2)
    one = (1, [0.1, 0.1, 0.1], [0.05, 0.06, math.nan])
    assert _add(table, 0, one, (1, [0.2, 0.2], [0.15, math.nan])) == [
        StepTimes(1, [0.1, 0.2], [0.05, 0.15]),
        StepTimes(2, [0.1, 0.2]),
    ]
    other = (3, [0.2, 0.2], [0.17, 0.18])
    assert _add(table, 0, (4, [0.1], [0.08]), other) == [
        StepTimes(3, [0.1, 0.2]),
        StepTimes(4, [0.1, 0.2], [0.08, 0.18]),
    ]

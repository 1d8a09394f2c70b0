"""What passes from the training thread to the reporter."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_client.environment import Environment
from bagua_client.measuring.clock import CpuClock
from bagua_client.measuring.profiler import Recording
from bagua_client.reporter import conversation
from bagua_client.reporter.conversation import (
    FEWEST_WAITING_STEPS,
    PROGRESS_SECONDS,
    STANDSTILL_SECONDS,
    Renewal,
    StepTable,
)
from bagua_client.reporter.inbox import (
    LARGEST_INBOX,
    LARGEST_INBOX_BYTES,
    Event,
    GatheredTimes,
    Inbox,
    RankTimes,
)
from bagua_client.reporter.reporter import Reporter
from bagua_client.service.breaker import LATE_PAUSE_SECONDS
from bagua_client.service.client import WHOLE_SECONDS, Progress, StepTimes
from bagua_client.tunable.tunable import Timeline
from bagua_wire.messages import LEASE_SECONDS, RENEWAL_SECONDS
from tests.client.agent.scripted_service import ScriptedService
from tests.client.reporter.test_reporter import DESCRIPTION, SMALL, tell, tuned, wait_for


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


def test_a_lease_outlasts_a_slow_renewal_and_a_service_that_was_away() -> None:
    assert RENEWAL_SECONDS + WHOLE_SECONDS + LATE_PAUSE_SECONDS < LEASE_SECONDS


def test_it_is_due_again_and_again_while_the_training_makes_steps() -> None:
    now = [0.0]
    renewal = Renewal(clock=lambda: now[0])
    due = []
    for second in range(int(STANDSTILL_SECONDS + 3 * RENEWAL_SECONDS)):
        now[0] = second
        if second < 2 * RENEWAL_SECONDS:
            renewal.stepped()
        if renewal.take_due():
            due.append(second)
    last_step = 2 * RENEWAL_SECONDS - 1
    renewals = int((last_step + STANDSTILL_SECONDS) // RENEWAL_SECONDS)
    assert due == [RENEWAL_SECONDS * (1 + place) for place in range(renewals)]
    renewal.stepped()
    now[0] += RENEWAL_SECONDS
    assert renewal.take_due()


@pytest.mark.parametrize("status", [None, 404])
def test_a_tuned_job_renews_its_lease_and_minds_no_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, status: int | None
) -> None:
    with ScriptedService([[SMALL]]) as service:
        reporter = Reporter(Environment(url=service.url), DESCRIPTION)
        tuned(reporter)
        if status is not None:
            service.refuses["observations"] = status
        before = service.refused
        monkeypatch.setattr("bagua_client.reporter.conversation.RENEWAL_SECONDS", 0.0)
        said = {"trial": 0, "steps": []}
        if status is None:
            wait_for(lambda: service.bodies("observations").count(said) >= 2)
        else:
            wait_for(lambda: service.refused >= before + 2)
        assert len(service.bodies("PUT")) == 1, "it is not registered, and tuned, once more"
        reporter.close(wait_seconds=60)
        assert service.bodies("ended")
    assert "cannot be used" not in caplog.text


def test_a_job_that_is_watched_no_longer_says_so() -> None:
    with ScriptedService([[SMALL]]) as service:
        reporter = Reporter(Environment(url=service.url), DESCRIPTION)
        tuned(reporter)
        reporter.finish("not watched")
        (ended,) = wait_for(lambda: service.bodies("ended"))
        assert ended["message"] == "not watched"


def test_how_far_a_tuned_job_is_is_told_seldom_and_each_step_once() -> None:
    now = [0.0]
    renewal = Renewal(clock=lambda: now[0])
    assert renewal.take_progress(at_once=True) is None, "it made no step"
    renewal.watched(StepTimes(step, (0.1, 0.2)) for step in range(5))
    renewal.watched([StepTimes(5, (0.9, 0.1))])
    assert renewal.take_progress() is None
    now[0] = PROGRESS_SECONDS
    assert renewal.take_progress() == Progress(5, 0.2)
    assert renewal.take_progress(at_once=True) is None
    renewal.watched([StepTimes(6, (0.3, 0.1))])
    assert renewal.take_progress() is None
    assert renewal.take_progress(at_once=True) == Progress(6, 0.3)


@pytest.mark.parametrize("status", [None, 404])
def test_at_its_end_a_tuned_job_says_how_far_it_came(status: int | None) -> None:
    with ScriptedService([[SMALL]]) as service:
        reporter = Reporter(Environment(url=service.url), DESCRIPTION)
        tuned(reporter)
        if status is not None:
            service.refuses["progress"] = status
        tell(reporter, None, 4, [0.1, 0.3, 0.2])
        reporter.close(wait_seconds=60)
        assert wait_for(lambda: service.bodies("ended"))
        told = [] if status else [{"step": 6, "seconds": 0.2}]
        assert service.bodies("progress") == told


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
        found += table.add(GatheredTimes(0, by_rank))
    assert found == [StepTimes(step, [1.0 + step, 2.0 + step]) for step in range(min(known))]


def _add(table: StepTable, trial: int, *by_rank: tuple[Any, ...]) -> list[StepTimes]:
    return table.add(GatheredTimes(trial, [RankTimes(*times) for times in by_rank]))


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


def test_steps_of_which_a_rank_tells_nothing_are_not_kept_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conversation, "MOST_WAITING_VALUES", 0)  # as for very many ranks
    table = StepTable(2)
    for first in range(0, 960, 32):
        assert _add(table, 0, (first, [0.1] * 32), (0, [])) == []
    oldest = 960 - FEWEST_WAITING_STEPS
    assert _add(table, 0, (960, []), (oldest - 1, [0.1])) == []
    assert _add(table, 0, (960, []), (oldest, [0.1])) == [StepTimes(oldest, [0.1, 0.1])]
    assert _add(table, 0, (960, []), (959, [0.1])) == [StepTimes(959, [0.1, 0.1])]


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

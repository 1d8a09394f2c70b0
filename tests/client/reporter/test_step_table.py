"""A step is told once it has the times of all ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_client.reporter import conversation
from bagua_client.reporter.conversation import FEWEST_WAITING_STEPS, StepTable
from bagua_client.reporter.inbox import GatheredTimes, RankTimes
from bagua_client.service.client import StepTimes


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

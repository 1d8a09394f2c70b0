from __future__ import annotations

import pytest

from bagua_autotune.model.job import Observation
from bagua_autotune.views.steps import (
    MOST_RANKS,
    exposed_seconds,
    rank_spread,
    rank_times,
    step_seconds,
)
from bagua_wire.profile import BucketTiming, Profile

STEPS = [
    Observation(1, (0.30, 0.30, 0.31), (0.10, 0.25, 0.10)),
    Observation(2, (0.30, 0.30, 0.30), (0.10, 0.20, 0.11)),
    Observation(3, (0.30, 0.90, 0.30), (0.10, 0.10, 0.12)),
]
PROFILE = Profile(
    step=1,
    step_seconds=0.3,
    ready_seconds=(0.1, 0.2),
    buckets=(BucketTiming(bytes=1, started_seconds=0.2, ended_seconds=0.3),),
)


def test_the_slowest_rank_decides_a_step_and_the_median_a_trial() -> None:
    assert step_seconds(STEPS) == 0.31
    assert step_seconds([]) is None


def test_communication_that_the_slowest_rank_s_computing_does_not_hide_is_exposed() -> None:
    assert exposed_seconds(STEPS, []) == pytest.approx(0.10)
    silent = [Observation(1, (0.3, 0.3))]
    assert exposed_seconds(silent, [PROFILE]) == pytest.approx(0.1)
    assert exposed_seconds(silent, []) is None


def test_who_computes_longest_most_often_is_the_slow_one() -> None:
    found = rank_spread(STEPS)
    assert found is not None
    assert (found.slowest_rank, found.slowest_share) == (1, pytest.approx(2 / 3))
    assert found.ratio == pytest.approx((0.20 - 0.11) / 0.30)


@pytest.mark.parametrize(
    ("seconds", "slowest", "slow_rank"),
    [
        (0.2, [2] * 10, 2),
        (0.12, [2] * 10, None),  # by less than a tenth of a step
        (0.2, [2, 0, 2, 1, 2, 2, 2, 0, 2, 2], 2),
        (0.2, [2, 0, 2, 1, 2, 3, 2, 0, 2, 1], None),  # as may happen to four that are alike
        (0.2, [2] * 3, None),  # too few steps to tell
    ],
)
def test_a_rank_is_called_slow_if_it_costs_much_and_most_of_the_time(
    seconds: float, slowest: list[int], slow_rank: int | None
) -> None:
    steps = [
        Observation(n, (0.3,) * 4, tuple(seconds if rank == slow else 0.1 for rank in range(4)))
        for n, slow in enumerate(slowest)
    ]
    found = rank_spread(steps)
    assert found is not None
    assert found.slow_rank == slow_rank


@pytest.mark.parametrize(
    ("slowest", "slow_rank"),
    [
        ([0, 1] * 10, None),  # one of two is always the slowest in half of the steps
        ([0] * 13 + [1] * 7, None),
        ([0] * 16 + [1] * 4, 0),
        ([0] * 5, None),
        ([1] * 7, 1),
    ],
)
def test_one_of_two_ranks_is_slow_if_it_is_so_more_often_than_by_chance(
    slowest: list[int], slow_rank: int | None
) -> None:
    computing = {0: (0.3, 0.1), 1: (0.1, 0.3)}
    steps = [Observation(n, (0.4, 0.4), computing[slow]) for n, slow in enumerate(slowest)]
    found = rank_spread(steps)
    assert found is not None
    assert found.slow_rank == slow_rank


def test_nothing_is_said_of_ranks_that_do_not_tell_or_are_alone() -> None:
    assert rank_spread([Observation(1, (0.3, 0.3))]) is None
    assert rank_spread([Observation(1, (0.3,), (0.2,))]) is None
    assert rank_spread([Observation(1, (0.3, 0.3), (0.2, None))]) is None
    (alone,) = rank_times([Observation(1, (0.3,))])
    assert (alone.rank, alone.seconds, alone.compute_seconds) == (0, 0.3, None)
    assert rank_times([]) == []


def test_of_many_ranks_the_slowest_and_the_fastest_are_shown() -> None:
    count = 1024
    compute = tuple(0.1 + (rank * 7 % count) * 1e-5 for rank in range(count))
    found = rank_times([Observation(1, (0.3,) * count, compute)])
    assert len(found) == MOST_RANKS
    assert [rank.rank for rank in found] == sorted(rank.rank for rank in found)
    shown = {rank.rank for rank in found}
    assert {compute.index(max(compute)), compute.index(min(compute))} <= shown

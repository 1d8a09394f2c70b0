"""What is made of the steps and the trials of a job."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_autotune.costs import Layouts
from bagua_autotune.model.job import Observation
from bagua_autotune.store.observations import SlowestTime
from bagua_autotune.tuning.status import job_state
from bagua_autotune.views.lists import shown_trials, trial_views
from bagua_autotune.views.overviews import buckets, make_layouts
from bagua_autotune.views.speedup import make_figures
from bagua_autotune.views.steps import (
    MOST_POINTS,
    MOST_RANKS,
    StepPoint,
    best_so_far,
    exposed_seconds,
    rank_spread,
    rank_times,
    step_seconds,
    switches,
    thin_out,
)
from bagua_wire.configuration import Configuration
from bagua_wire.cutting import Tensor
from bagua_wire.profile import BucketTiming, Profile
from tests.autotune.support import present
from tests.autotune.views.jobs import (
    DEFAULT,
    FASTER,
    HIDDEN,
    RESULT,
    SLOWER,
    job,
    reading,
    trial,
)

SECONDS = st.floats(1e-3, 10.0)


@given(st.lists(st.lists(SECONDS, min_size=1, max_size=80), max_size=20), st.integers(1, 60))
def test_thinning_out_keeps_every_trial_and_invents_nothing(
    trials: list[list[float]], most_points: int
) -> None:
    times, step = [], 0
    for index, members in enumerate(trials):
        for seconds in members:
            step += 1
            times.append(SlowestTime(index, step, seconds))
    series = thin_out(times, most_points)
    assert len(series.points) <= max(most_points, len(trials))
    found = {index: list(p) for index, p in groupby(series.points, key=lambda p: p.trial)}
    assert set(found) == set(range(len(trials)))
    for index, points in found.items():
        assert len(points) == -(-len(trials[index]) // series.stride)
        for point in points:
            assert min(trials[index]) <= point.seconds <= max(trials[index])
            assert times[point.step - 1].trial == index
    assert [p.step for p in series.points] == sorted({p.step for p in series.points})
    if len(times) <= most_points:
        assert series.points == [
            StepPoint(step=t.step, trial=t.trial, seconds=t.slowest) for t in times
        ]


def test_many_steps_become_a_thousand_points() -> None:
    series = thin_out([SlowestTime(step // 300, step, 0.2) for step in range(20_000)])
    assert 500 < len(series.points) <= MOST_POINTS


@given(st.lists(st.none() | SECONDS, max_size=30))
def test_the_best_so_far_never_gets_worse_where_nothing_is_measured_twice(
    measured: list[float | None],
) -> None:
    sizes = (Configuration(FASTER, bucket_bytes=size) for size in range(1, 99))
    trials = [trial(n, size, seconds) for n, (size, seconds) in enumerate(zip(sizes, measured))]  # noqa: B905
    found = best_so_far(reading(job(), trials), None)
    assert [best.trial for best in found] == [t.index for t in trials if t.estimate]
    assert all(a.seconds >= b.seconds for a, b in pairwise(found))
    if found:
        assert abs(found[-1].seconds - min(s for s in measured if s)) < 1e-9


def test_the_luckiest_of_two_measurements_is_not_the_best_so_far() -> None:
    """Chart, figures and progress name one value, and the same."""
    trials = [trial(0, DEFAULT, 0.3), trial(1, FASTER, 0.26), trial(2, SLOWER, 0.31)]
    trials.append(trial(3, FASTER, 0.24))
    found = reading(job(), trials)
    pooled = pytest.approx((0.26 * 0.24) ** 0.5)
    assert [best.seconds for best in best_so_far(found, None)] == [
        pytest.approx(0.3), pytest.approx(0.26), pytest.approx(0.26), pooled
    ]  # fmt: skip
    figures = make_figures(found, [])
    assert figures.incumbent_seconds == pooled
    progress = job_state(found.job, trials).progress
    assert progress.speedup == figures.speedup == pytest.approx(0.3 / (0.26 * 0.24) ** 0.5)
    # Two measurements that far apart say that neither is sure to a few thousandths.
    assert figures.speedup_low is not None
    assert figures.speedup_low < 0.3 / 0.26


def test_a_repeat_that_is_slower_raises_the_best_so_far() -> None:
    trials = [trial(0, DEFAULT, 0.3), trial(1, FASTER, 0.2), trial(2, FASTER, 0.26)]
    found = [best.seconds for best in best_so_far(reading(job(), trials), None)]
    assert found[1] < found[2] < 0.26
    slower = [*trials, trial(3, FASTER, 0.9), trial(4, FASTER, 0.9)]
    assert best_so_far(reading(job(), slower), None)[-1].seconds == pytest.approx(0.3)


def test_what_the_ranks_failed_with_is_not_the_best() -> None:
    failed = replace(trial(2, FASTER), state="failed", failure="no")
    trials = [trial(0, DEFAULT, 0.3), trial(1, FASTER, 0.2), failed]
    found = reading(job(), trials)
    assert make_figures(found, []).incumbent_seconds == pytest.approx(0.3)
    progress = job_state(found.job, trials).progress
    assert progress.incumbent == DEFAULT


def test_switches_and_ends_of_tunings_stand_in_step_order() -> None:
    rounds = [trial(0, DEFAULT, 0.3), trial(1, FASTER, 0.2), trial(2, SLOWER, 0.4, round=1)]
    again = switches(reading(job("tuning", RESULT, round=1), rounds))
    assert [(s.step, s.trial, s.words) for s in again] == [
        (0, 0, "bucket 25 MiB, flat"),
        (10, 1, "bucket 1 MiB, hierarchical"),
        (19, None, "tuned"),
        (20, 2, "bucket 64 MiB, flat"),
    ]
    over = switches(reading(job("finished", RESULT, round=1), rounds))
    assert (over[-1].step, over[-1].words) == (29, "tuned: bucket 1 MiB, hierarchical")


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
    found = present(rank_spread(STEPS))
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
    found = present(rank_spread(steps))
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
    found = present(rank_spread(steps))
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


def tensor(index: int, size: int, group: str) -> Tensor:
    return Tensor(name=f"t{index}", elements=size, bytes=size, dtype=group, group=group)


MODELS = st.lists(st.tuples(st.integers(0, 5000), st.sampled_from("ab")), min_size=1, max_size=40)


@given(MODELS, st.integers(1, 20_000), st.data())
def test_the_buckets_hold_every_tensor_once(
    model: list[tuple[int, str]], size: int, data: st.DataObject
) -> None:
    tensors = [tensor(index, *found) for index, found in enumerate(model)]
    configuration = {"bucket_bytes": size, "first_bucket_bytes": data.draw(st.integers(0, size))}
    if data.draw(st.booleans()):
        ends = data.draw(st.sets(st.integers(1, len(tensors))))
        cuts = sorted(ends | {len(tensors)})
        counts = tuple(b - a for a, b in zip([0, *cuts], cuts, strict=False))
        configuration["buckets"] = counts
    layouts = Layouts(tensors)
    found = buckets(layouts, Configuration(configuration))
    assert sum(bucket.tensors for bucket in found) == len(tensors)
    assert sum(bucket.bytes for bucket in found) == sum(t.bytes for t in tensors)
    cut = layouts.cut(Configuration(configuration))
    assert [bucket.bytes for bucket in found] == cut.sizes_bytes.tolist()
    assert [bucket.last for bucket in found] == [f"t{last}" for last in cut.last.tolist()]
    group_of = {t.name: t.group for t in tensors}
    if "buckets" not in configuration:
        assert all(group_of[b.first] == group_of[b.last] for b in found)


def test_roles_come_in_words() -> None:
    tensors = [tensor(index, 400, "a") for index in range(10)]
    default = Configuration(bucket_bytes=4096, hierarchical="off")
    best = Configuration(bucket_bytes=1000, hierarchical="leaders")
    found = make_layouts(Layouts(tensors), {"default": default, "incumbent": best})
    assert (found.tensors, found.bytes) == (10, 4000)
    assert [(shown.role, shown.words, len(shown.buckets)) for shown in found.layouts] == [
        ("default", "bucket 4 KiB, flat", 1),
        ("incumbent", "bucket 1000 B, hierarchical", 4),
    ]
    last = found.layouts[1].buckets[-1]
    assert (last.bytes, last.tensors, last.first, last.last) == (400, 1, "t9", "t9")


def test_a_trial_is_compared_with_the_default_measured_beside_it() -> None:
    """The machine became four times as slow; in the middle of that the default takes 0.4 s."""
    first = [trial(0, DEFAULT, 0.2), trial(1, FASTER, 0.15), trial(2, DEFAULT, 0.8)]
    second = [trial(3, DEFAULT, 0.3, round=1), trial(4, FASTER, 0.1, round=1), trial(5, SLOWER)]
    found = trial_views(job(round=1), [*first, *second], {})
    assert [view.speedup for view in found] == [
        1.0, pytest.approx(8 / 3), 1.0, 1.0, pytest.approx(3), None,
    ]  # fmt: skip
    assert [view.seconds for view in found][3:] == [pytest.approx(0.3), pytest.approx(0.1), None]


def test_the_best_is_the_first_trial_of_what_was_kept() -> None:
    measured = [trial(0, DEFAULT, 0.3), trial(1, FASTER, 0.25), trial(2, FASTER, 0.2)]
    found = shown_trials(reading(job("finished", RESULT), measured))
    assert [(view.index, view.words) for view in found if view.is_best] == [
        (1, "bucket 1 MiB, hierarchical")
    ]


def test_a_trial_above_the_ceiling_is_noise_unless_the_result_is_above_it_too() -> None:
    measured = [trial(0, DEFAULT, 0.3), trial(1, FASTER, 0.25), trial(2, SLOWER, 0.29)]
    found = shown_trials(reading(job(), measured, ceiling=HIDDEN))
    assert [view.is_noise for view in found] == [False, True, False]
    assert [view.speedup for view in found] == [1.0, None, pytest.approx(0.3 / 0.29)]
    confirmed = reading(job("finished", RESULT), measured, ceiling=HIDDEN)
    assert not any(view.is_noise for view in shown_trials(confirmed)), "computing became faster"

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_autotune.store.observations import SlowestTime
from bagua_autotune.tuning.status import job_state
from bagua_autotune.views.speedup import make_figures
from bagua_autotune.views.steps import MOST_POINTS, StepPoint, best_so_far, switches, thin_out
from bagua_wire.configuration import Configuration
from tests.autotune.views.jobs import DEFAULT, FASTER, RESULT, SLOWER, job, reading, trial

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

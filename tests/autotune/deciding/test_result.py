from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_autotune.deciding.result import Bill, bill
from bagua_autotune.measuring.rounds import Round
from bagua_autotune.model.job import Api, Trial
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.store.observations import Steps
from bagua_wire.configuration import Configuration
from tests.autotune.deciding.test_decision import make_job

BASELINE_SECONDS = 0.2


def trial(index: int, seconds: float | None, count: int = 10, outliers: int = 0) -> Trial:
    configuration = Configuration(bucket_bytes=index + 1)
    if seconds is None:
        return Trial(index, "search", configuration, "failed", failure="no")
    found = Estimate(math.log(seconds), 0.01, count, outliers)
    return Trial(index, "search", configuration, "measured", found)


def round_of(trials: list[Trial], protocol: Api = "v2") -> Round:
    """A round whose trial 0 is of the default."""
    baseline = Configuration(bucket_bytes=1)
    return Round(replace(make_job(), baseline=baseline, protocol=protocol), trials)


def ten(first: int) -> Steps:
    return Steps(first, first + 9, 10)


def test_only_time_beyond_the_baseline_s_is_cost_and_switching_is() -> None:
    trials = [trial(0, 0.2), trial(1, 0.3, 8, 2), trial(2, 0.1), trial(3, None)]
    observed = {0: ten(5), 1: ten(20), 2: ten(36)}
    switches = {1: 0.05, 2: 0.15, 7: 100.0}  # the last one's of another round
    found = bill(round_of(trials), observed, switches)
    assert found.steps == 15 + 16 + 10
    # 16 steps of 0.3 s: those dropped at the switches too; what was faster earns nothing here.
    assert found.cost_seconds == pytest.approx(16 * 0.1 + 0.2)
    assert found.cost_steps == pytest.approx(found.cost_seconds / 0.2)


def test_no_trial_of_the_default_is_cost_however_slow_the_machine_became() -> None:
    """It went from 0.2 to 0.4 s a step; a trial between the two is compared with 0.28 s."""
    again = replace(trial(2, 0.4), configuration=Configuration(bucket_bytes=1))
    trials = [trial(0, 0.2), trial(1, 0.08**0.5 * 1.5), again]
    observed = {0: ten(0), 1: ten(10), 2: ten(20)}
    found = bill(round_of(trials), observed, {})
    assert found.cost_seconds == pytest.approx(10 * 0.08**0.5 * 0.5)


def test_a_job_that_was_never_measured_costs_nothing() -> None:
    assert bill(round_of([]), {}, {}) == Bill(0, 0.0, 0.0)


def test_speeds_cannot_be_added_up() -> None:
    trials = [Trial(0, "search", Configuration(bucket_bytes=1), "measured", Estimate(-9.0, 1.0, 3))]
    # Three reports, each of a hundred steps.
    observed = {0: Steps(100, 300, 3), 1: Steps(400, 600, 3)}
    assert bill(round_of(trials, "v1"), observed, {}) == Bill(200, 0.0, 0.0)
    trials.append(replace(trials[0], index=1))
    assert bill(round_of(trials, "v1"), observed, {}).steps == 500


def test_the_steps_of_a_search_never_become_fewer() -> None:
    """A trial's first steps only warm up; what was counted while it ran still counts then."""
    running = replace(trial(0, None), state="running", failure=None)
    observed = {0: Steps(0, 24, 25)}
    counts = [bill(round_of([running]), observed, {}).steps]
    trials = [trial(0, 0.2, 5), replace(running, index=1)]
    counts.append(bill(round_of(trials), observed, {}).steps)
    observed[1] = Steps(27, 27, 1)
    counts.append(bill(round_of(trials), observed, {}).steps)
    assert counts == [25, 25, 28]


SECONDS = st.floats(0.01, 10)


@given(st.lists(SECONDS, min_size=1, max_size=8), st.data())
def test_a_bill_is_never_negative_and_grows_with_every_slow_trial(
    seconds: list[float], data: st.DataObject
) -> None:
    trials = [trial(index, value) for index, value in enumerate([BASELINE_SECONDS, *seconds])]
    # Steps count anew after a restart of the training.
    observed = {t.index: ten(data.draw(st.integers(0, 10**6))) for t in trials}
    whole = bill(round_of(trials), observed, {})
    before = bill(round_of(trials[:-1]), observed, {})
    assert 0 <= before.cost_seconds <= whole.cost_seconds
    assert whole.steps > before.steps > 0


@given(st.floats(1.001, 100), st.floats(0, 1e6))
def test_after_as_many_steps_as_are_named_the_cost_is_earned(speedup: float, cost: float) -> None:
    steps = Bill(100, cost * 0.2, cost).payback_steps(speedup)
    assert steps is not None
    saved_per_step = 1 - 1 / speedup
    assert steps * saved_per_step >= cost * (1 - 1e-9)
    assert (steps - 1) * saved_per_step <= cost


def test_what_is_no_faster_never_pays() -> None:
    assert Bill(100, 1.0, 5.0).payback_steps(1.0) is None
    assert Bill(100, 1.0, 5.0).payback_steps(0.9) is None
    assert Bill(100, 0.0, 0.0).payback_steps(1.5) == 0


def test_without_a_measured_baseline_no_step_is_said_to_have_been_slower() -> None:
    trials, observed = [trial(0, None), trial(1, 3.0)], {0: Steps(5, 8, 4), 1: ten(9)}
    switched = {1: 0.05}
    found = bill(round_of(trials), observed, switched)
    assert found.steps == 4 + 10
    assert (found.cost_seconds, found.cost_steps) == (0.05, 0.0)

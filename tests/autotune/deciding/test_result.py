"""What a tuning cost, when that is earned, and whether a job is tuned again after a change."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_autotune.deciding.result import (
    COST_SHARE,
    FREE_STEPS,
    Bill,
    allowed_steps,
    bill,
    refusal,
    spent_steps,
)
from bagua_autotune.measuring.rounds import Round
from bagua_autotune.model.job import Api, Event, Job, Trial
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.store import Store
from bagua_autotune.store.observations import Steps
from bagua_autotune.tuning.tuner import Tuner
from bagua_wire.configuration import Configuration
from tests.autotune.deciding.test_decision import make_job
from tests.autotune.support import Ranks, drive, make_spec, present
from tests.autotune.views.jobs import DEFAULT, FASTER, SLOWER, job, trial

BASELINE_SECONDS = 0.2


def ran(index: int, seconds: float | None, count: int = 10, outliers: int = 0) -> Trial:
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
    trials = [ran(0, 0.2), ran(1, 0.3, 8, 2), ran(2, 0.1), ran(3, None)]
    observed = {0: ten(5), 1: ten(20), 2: ten(36)}
    switches = {1: 0.05, 2: 0.15, 7: 100.0}  # the last one's of another round
    found = bill(round_of(trials), observed, switches)
    assert found.steps == 15 + 16 + 10
    # 16 steps of 0.3 s: those dropped at the switches too; what was faster earns nothing here.
    assert found.cost_seconds == pytest.approx(16 * 0.1 + 0.2)
    assert found.cost_steps == pytest.approx(found.cost_seconds / 0.2)


def test_no_trial_of_the_default_is_cost_however_slow_the_machine_became() -> None:
    """It went from 0.2 to 0.4 s a step; a trial between the two is compared with 0.28 s."""
    again = replace(ran(2, 0.4), configuration=Configuration(bucket_bytes=1))
    trials = [ran(0, 0.2), ran(1, 0.08**0.5 * 1.5), again]
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
    running = replace(ran(0, None), state="running", failure=None)
    observed = {0: Steps(0, 24, 25)}
    counts = [bill(round_of([running]), observed, {}).steps]
    trials = [ran(0, 0.2, 5), replace(running, index=1)]
    counts.append(bill(round_of(trials), observed, {}).steps)
    observed[1] = Steps(27, 27, 1)
    counts.append(bill(round_of(trials), observed, {}).steps)
    assert counts == [25, 25, 28]


SECONDS = st.floats(0.01, 10)


@given(st.lists(SECONDS, min_size=1, max_size=8), st.data())
def test_a_bill_is_never_negative_and_grows_with_every_slow_trial(
    seconds: list[float], data: st.DataObject
) -> None:
    trials = [ran(index, value) for index, value in enumerate([BASELINE_SECONDS, *seconds])]
    # Steps count anew after a restart of the training.
    observed = {t.index: ten(data.draw(st.integers(0, 10**6))) for t in trials}
    whole = bill(round_of(trials), observed, {})
    before = bill(round_of(trials[:-1]), observed, {})
    assert 0 <= before.cost_seconds <= whole.cost_seconds
    assert whole.steps > before.steps > 0


@given(st.floats(1.001, 100), st.floats(0, 1e6))
def test_after_as_many_steps_as_are_named_the_cost_is_earned(speedup: float, cost: float) -> None:
    steps = present(Bill(100, cost * 0.2, cost).payback_steps(speedup))
    saved_per_step = 1 - 1 / speedup
    assert steps * saved_per_step >= cost * (1 - 1e-9)
    assert (steps - 1) * saved_per_step <= cost


def test_what_is_no_faster_never_pays() -> None:
    assert Bill(100, 1.0, 5.0).payback_steps(1.0) is None
    assert Bill(100, 1.0, 5.0).payback_steps(0.9) is None
    assert Bill(100, 0.0, 0.0).payback_steps(1.5) == 0


def test_without_a_measured_baseline_no_step_is_said_to_have_been_slower() -> None:
    trials, observed = [ran(0, None), ran(1, 3.0)], {0: Steps(5, 8, 4), 1: ten(9)}
    switched = {1: 0.05}
    found = bill(round_of(trials), observed, switched)
    assert found.steps == 4 + 10
    assert (found.cost_seconds, found.cost_steps) == (0.05, 0.0)


def after_round(number: int, max_rounds: int) -> Job:
    return replace(make_job(max_rounds=max_rounds), phase="finished", round=number)


@given(st.integers(0, 50), st.integers(1, 60), st.floats(0, 1e6), st.floats(0, 1e6))
def test_rounds_are_bounded_and_the_more_they_cost_the_longer_the_next_one_waits(
    number: int, most: int, spent: float, allowed: float
) -> None:
    of = after_round(number, most)
    refused = refusal(of, spent, allowed)
    if number + 1 >= most:
        assert refused is not None
    elif refused is None:
        assert spent <= allowed
        assert refusal(of, spent, allowed + 1) is None
        assert refusal(of, spent / 2, allowed) is None
    assert refusal(after_round(0, 2), 0.0, FREE_STEPS) is None, "at once"


def test_what_tuning_again_may_cost_grows_with_the_training() -> None:
    observed = {0: Steps(100, 150, 50), 1: Steps(151, 300, 50)}
    assert allowed_steps({}) == FREE_STEPS
    assert allowed_steps(observed) == FREE_STEPS + COST_SHARE * 200
    assert allowed_steps(observed, 1100) == FREE_STEPS + COST_SHARE * 1000


def test_a_later_round_is_charged_against_what_was_kept_before() -> None:
    """The default takes 0.3 s and what was kept 0.2 s: trying the default costs half of a step."""
    first = [trial(0, DEFAULT, 0.3), trial(1, FASTER, 0.2)]
    again = [trial(2, FASTER, 0.2, round=1), trial(3, DEFAULT, 0.3, round=1)]
    again += [trial(4, SLOWER, 0.35, round=1)]
    of, observed = job(round=1), {each: Steps(10 * each, 10 * each + 9, 10) for each in range(5)}
    assert bill(Round.of(of, first, 0), observed, {}).cost_seconds == 0.0
    assert spent_steps(of, first, observed, {}) == 0.0
    spent = spent_steps(of, [*first, *again], observed, {})
    assert spent == pytest.approx((10 * 0.1 + 10 * 0.15) / 0.3)


def drift(step: int, seconds: float) -> Event:
    return Event("drift", None, step, f"0.2 s became {seconds} s", seconds)


def finished(tuner: Tuner) -> int:
    """The last step of a tuned job."""
    tuner.register("job", make_spec(limits={"max_samples": 6}))
    assert drive(tuner, "job", Ranks(noise=0.001)).state == "finished"
    return max(observed.step for _, observed in tuner.store.observations.of("job"))


def test_on_a_faster_network_what_was_kept_is_left_where_the_default_beats_it() -> None:
    """All of its steps became faster, and those of the default most."""
    tuner = Tuner(Store("sqlite://"))
    last = finished(tuner)
    kept, default = tuner.status("job").configuration, tuner.store.jobs.get("job").baseline
    assert kept != default
    ranks = Ranks(1, 0.001, lambda tried: 0.1 if tried == default else 0.15)
    ranks.step = last + 200
    tuner.take_event("job", drift(ranks.step, 0.15))
    status = drive(tuner, "job", ranks)
    assert (status.round, status.configuration) == (1, default)


def test_rounds_of_a_machine_that_changes_all_the_time_cost_a_bounded_part_of_the_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All but what is kept is half as fast; a change comes every 50 steps."""
    caplog.set_level("INFO")
    tuner = Tuner(Store("sqlite://"))
    finished(tuner)
    idle = tuner.status("job").configuration
    ranks = Ranks(1, 0.001, lambda tried: 0.2 if tried == idle else 0.4)
    for _ in range(4):
        ranks.run(idle, 50)
        tuner.take_event("job", drift(ranks.step, 0.3))
        drive(tuner, "job", ranks)
    of, trials, observed = (
        tuner.store.jobs.get("job"),
        tuner.store.trials.of("job"),
        tuner.store.observations.steps("job"),
    )
    spent = spent_steps(of, trials, observed, tuner.store.events.switch_seconds("job"))
    assert spent > 0
    one_more = spent / of.round
    assert spent <= allowed_steps(observed, ranks.step) + one_more
    assert "not tuned again: that has cost" in caplog.text


def test_a_round_ends_when_tuning_again_has_cost_what_it_may() -> None:
    """All but the two known ones are ten times as slow."""
    tuner = Tuner(Store("sqlite://"))
    finished(tuner)
    kept, default = tuner.status("job").configuration, tuner.store.jobs.get("job").baseline
    ranks = Ranks(1, 0.001, lambda tried: 0.2 if tried == kept else 0.25 if tried == default else 2)
    tuner.take_event("job", drift(ranks.step + 200, 0.3))
    assert drive(tuner, "job", ranks).round == 1
    tried = [t for t in tuner.store.trials.of("job") if t.round == 1 and t.purpose == "search"]
    assert len(tried) == 3, "one of them cost more than all may"
    result = present(tuner.status("job").result)
    assert result.configuration == kept, "confirmed again"

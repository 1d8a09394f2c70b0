"""Whether a job is tuned again after a change, and what all of that may cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_autotune.deciding.result import bill
from bagua_autotune.deciding.tuned_again import (
    COST_SHARE,
    FREE_STEPS,
    allowed_steps,
    refusal,
    spent_steps,
)
from bagua_autotune.measuring.rounds import Round
from bagua_autotune.model.job import Event, Job
from bagua_autotune.store import Store
from bagua_autotune.store.observations import Steps
from bagua_autotune.tuning.tuner import Tuner
from tests.autotune.deciding.test_decision import make_job
from tests.autotune.support import Ranks, drive, make_spec
from tests.autotune.views.jobs import DEFAULT, FASTER, SLOWER, job, trial


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
    result = tuner.status("job").result
    assert result is not None
    assert result.configuration == kept, "confirmed again"

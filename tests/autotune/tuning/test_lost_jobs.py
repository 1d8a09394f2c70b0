"""Jobs whose lease runs out, and what their absence leaves as it was."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import ANY

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy.exc import OperationalError

from bagua_autotune.model.job import SILENT_SECONDS, Observation
from bagua_autotune.store import Store
from bagua_autotune.tuning.lost_jobs import HEARD_AGAIN, LOOK_SECONDS, MOST_BETWEEN_LOOKS_SECONDS
from bagua_autotune.tuning.tuner import Tuner
from bagua_wire.messages import LEASE_SECONDS
from tests.autotune.support import Clock, Ranks, make_spec, present, stored_jobs
from tests.autotune.tuning.test_gone import events, run


@pytest.fixture
def clock() -> Clock:
    return Clock(1e9, step=0)


def tuners(url: str, clock: Clock, count: int = 1) -> list[Tuner]:
    """Replicas on one database."""
    return [Tuner(Store(url), "random", clock=clock) for _ in range(count)]


def listen(tuner: Tuner, clock: Clock, seconds: float, *alive: str) -> None:
    """Let it look as it does by itself; the ranks of some jobs renew their leases meanwhile."""
    for _ in range(round(seconds / LOOK_SECONDS)):
        clock.now += LOOK_SECONDS
        for job_id in alive:
            tuner.observe(job_id, 0, [])
        tuner.leases.look()


def phases(tuner: Tuner) -> dict[str, str]:
    return {job.id: job.phase for job in stored_jobs(tuner.store)}


def test_who_listened_all_the_while_knows_after_minutes_who_is_lost(
    empty_url: str, clock: Clock
) -> None:
    (tuner,) = tuners(empty_url, clock)
    for job_id in ("alive", "gone", "tuned", "tuned and gone"):
        tuner.register(job_id, make_spec(limits={"max_samples": 2}))
    for job_id in ("tuned", "tuned and gone"):
        run(tuner, job_id, Ranks(noise=0.001))
    tuner.register("of bagua", make_spec(), protocol="v1")
    listen(tuner, clock, LEASE_SECONDS, "alive", "tuned")
    assert not any(job.is_lost for job in stored_jobs(tuner.store))
    listen(tuner, clock, LOOK_SECONDS, "alive", "tuned")
    assert phases(tuner) == {
        "alive": "tuning",
        "gone": "lost",
        "tuned": "finished",
        "tuned and gone": "finished",
        "of bagua": "tuning",
    }
    assert {job.id for job in stored_jobs(tuner.store) if job.is_lost} == {"gone", "tuned and gone"}
    assert [kind for kind, _ in events(tuner, "gone")] == ["lost"]
    # What is tuned is alive again, too, and as it was.
    result = tuner.status("tuned and gone").result
    tuner.observe("tuned and gone", 0, [])
    found = tuner.store.jobs.get("tuned and gone")
    assert (found.is_lost, found.phase, found.result) == (False, "finished", result)
    assert events(tuner, "tuned and gone")[-1] == ("note", HEARD_AGAIN)
    tuner.store.close()


def test_who_did_not_listen_loses_nobody_for_a_silence_of_minutes(
    empty_url: str, clock: Clock
) -> None:
    """A service that was killed and started again, or stood still, or whose database failed."""
    (tuner,) = tuners(empty_url, clock)
    tuner.register("job", make_spec())
    listen(tuner, clock, LEASE_SECONDS, "job")
    clock.now += LEASE_SECONDS
    listen(tuner, clock, LEASE_SECONDS - LOOK_SECONDS)
    (again,) = tuners(empty_url, clock)
    again.leases.look()
    assert phases(tuner) == {"job": "tuning"}
    listen(tuner, clock, 2 * LOOK_SECONDS)
    assert phases(tuner) == {"job": "lost"}
    tuner.store.close()
    again.store.close()


def test_looks_that_fail_are_none(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    (tuner,) = tuners("sqlite://", clock)
    tuner.register("job", make_spec())
    listen(tuner, clock, LEASE_SECONDS, "job")

    def fails(*_: object, **__: object) -> list[str]:
        raise OperationalError("", {}, Exception("the database is away"))

    with monkeypatch.context() as broken:
        broken.setattr(tuner.store.jobs, "lose_silent", fails)
        for _ in range(round(MOST_BETWEEN_LOOKS_SECONDS / LOOK_SECONDS) + 10):
            clock.now += LOOK_SECONDS
            with pytest.raises(OperationalError):
                tuner.leases.look()
    clock.now += LOOK_SECONDS
    tuner.leases.look()
    assert phases(tuner) == {"job": "tuning"}


def test_of_two_replicas_one_marks_a_lost_job_and_either_hears_it_again(
    empty_url: str, clock: Clock
) -> None:
    one, two = tuners(empty_url, clock, 2)
    one.register("job", make_spec())
    for _ in range(round(LEASE_SECONDS / LOOK_SECONDS) + 2):
        clock.now += LOOK_SECONDS
        one.leases.look()
        two.leases.look()
    assert [kind for kind, _ in events(one, "job")] == ["lost"]
    assert one.status("job").trial is None
    two.observe("job", 0, [Observation(1, (0.2,) * 4)])
    status = one.status("job")
    assert (status.state, status.trial.index if status.trial else None) == ("tuning", 0)
    for tuner in (one, two):
        tuner.store.close()


@settings(max_examples=20, deadline=None, phases=[Phase.generate])
@given(
    before=st.integers(min_value=1, max_value=30),
    away_seconds=st.floats(min_value=2 * SILENT_SECONDS, max_value=1e6),
    is_in_a_step=st.booleans(),
)
@pytest.mark.slow
def test_no_absence_is_in_any_measurement(
    before: int, away_seconds: float, is_in_a_step: bool
) -> None:
    """A job that was away, at any moment, ends with the trials and times of one that was not."""
    found = []
    for is_away in (False, True):
        clock, ranks = Clock(1e9, step=0), Ranks(noise=0.002)
        (tuner,) = tuners("sqlite://", clock)
        tuner.register("job", make_spec(limits={"max_samples": 4, "warmup_seconds": 0}))
        reports = 0
        while (trial := tuner.open_trial("job")) is not None:
            ((step, seconds), *_) = ranks.run(trial.configuration, 1)
            clock.now += max(seconds)
            if is_away and reports == before:
                clock.now += away_seconds
                tuner.leases.look()
                assert phases(tuner) == {"job": "lost"}
                assert tuner.open_trial("job") == trial
                if is_in_a_step:  # the processes were stopped in the middle of one
                    tuner.observe("job", trial.index, [Observation(9999, (away_seconds,) * 4)])
            tuner.observe("job", trial.index, [Observation(step, tuple(seconds))])
            reports += 1
        result = present(tuner.status("job").result)
        found.append((tuner, result))
    (still, here), (tuner, away) = found
    assert tuner.store.trials.of("job") == [
        replace(trial, started_at=ANY, ended_at=ANY) for trial in still.store.trials.of("job")
    ]
    a_step_seconds = 1.0  # between the last word and the absence
    assert away.seconds == pytest.approx(here.seconds, abs=a_step_seconds)
    assert tuner.status("job").progress.elapsed_seconds == pytest.approx(
        away.seconds, abs=a_step_seconds
    )
    assert (away.cost_seconds, away.speedup) == (here.cost_seconds, here.speedup)

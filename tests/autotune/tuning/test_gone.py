"""Trainings that are gone without a word, and those that were only taken for it."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from bagua_autotune.model.job import SILENT_SECONDS, Event, Observation
from bagua_autotune.store import Store
from bagua_autotune.tuning.lost_jobs import GONE, HEARD_AGAIN, InHand
from bagua_autotune.tuning.tuner import Tuner
from tests.autotune.support import Clock, Ranks, make_spec, stored_jobs


@pytest.fixture
def tuner(store: Store, clock: Clock) -> Tuner:
    return Tuner(store, clock=clock)


def run(tuner: Tuner, job_id: str, ranks: Ranks, trials: int = 1000) -> None:
    """Let the ranks run so many trials more, or until the tuning ends."""
    while (trial := tuner.open_trial(job_id)) and trials:
        steps = ranks.run(trial.configuration, 10)
        told = [Observation(step, tuple(seconds)) for step, seconds in steps]
        tuner.observe(job_id, trial.index, told)
        after = tuner.open_trial(job_id)
        trials -= after is None or after.index != trial.index


def events(tuner: Tuner, job_id: str) -> list[tuple[str, str]]:
    return [(event.kind, event.message) for event in tuner.store.events.of(job_id)]


def test_a_job_that_says_nothing_for_long_is_lost(tuner: Tuner, clock: Clock) -> None:
    for job_id in ("tuning", "finished", "ended", "late"):
        tuner.register(job_id, make_spec(limits={"max_samples": 3}))
    run(tuner, "tuning", Ranks(noise=0.001), trials=2)
    run(tuner, "finished", Ranks(noise=0.001))
    tuner.take_event("ended", Event("ended"))
    silent = tuner.status("tuning")
    clock.now += SILENT_SECONDS
    tuner.take_event("late", Event("note"))
    tuner.leases.look()
    tuner.leases.look()
    assert {job.id: job.phase for job in stored_jobs(tuner.store)} == {
        "tuning": "lost",
        "finished": "finished",
        "ended": "ended",
        "late": "tuning",
    }
    silent_for_an_hour = [("lost", "nothing was heard for 60 min: the training is taken for lost")]
    assert events(tuner, "tuning") == events(tuner, "finished") == silent_for_an_hour
    assert events(tuner, "ended") == [("ended", "")]
    assert {job.id for job in stored_jobs(tuner.store) if job.is_lost} == {"tuning", "finished"}
    # It gets no older than when it was last heard of.
    job, status = tuner.store.jobs.get("tuning"), tuner.status("tuning")
    assert job.last_contact_at < clock.now - SILENT_SECONDS < job.ended_at
    assert status.progress == silent.progress.model_copy(update={"seconds_left": 0.0})


def test_a_registration_finds_the_lost_ones_before_it(tuner: Tuner, clock: Clock) -> None:
    """A service that one training has for itself is asked for nothing else, perhaps."""
    tuner.register("gone", make_spec())
    clock.now += SILENT_SECONDS + 1
    tuner.register("new", make_spec())
    assert {job.id: job.phase for job in stored_jobs(tuner.store)} == {
        "gone": "lost",
        "new": "tuning",
    }


@pytest.mark.parametrize("says", ["steps", "switched", "registers"])
def test_a_paused_job_goes_on_where_it_was(tuner: Tuner, clock: Clock, says: str) -> None:
    tuner.register("job", make_spec(limits={"max_samples": 4}))
    ranks = Ranks(noise=0.001)
    run(tuner, "job", ranks, trials=2)
    before = tuner.status("job")
    clock.now += SILENT_SECONDS + 1
    tuner.leases.look()
    assert tuner.status("job").trial is None
    if says == "switched":
        tuner.take_event("job", Event("switched", 2, seconds=0.1))
    elif says == "registers":
        tuner.register("job", make_spec(limits={"max_samples": 4}))
    else:
        # One of the pause's own length among them.
        tuner.observe("job", 2, [Observation(9_999, (SILENT_SECONDS,) * 4)])
    after = tuner.status("job")
    assert after.state == before.state
    running = tuner.store.trials.get("job", 2)
    assert (running.is_open, running.configuration) == (True, before.configuration)
    assert after.trial is not None
    # Once it is told that a trial runs, what follows it is known.
    assert after.trial.index == (3 if says == "switched" else 2)
    assert tuner.store.jobs.get("job").ended_at is None
    assert (("note", HEARD_AGAIN) in events(tuner, "job")) is (says != "registers")
    ranks.step = 10_000
    run(tuner, "job", ranks)
    assert tuner.status("job").state == "finished"
    assert tuner.status("job").result.kept == "winner"


def test_a_job_that_said_its_end_stays_ended_whatever_comes_late(tuner: Tuner) -> None:
    tuner.register("job", make_spec())
    tuner.take_event("job", Event("ended"))
    tuner.observe("job", 0, [Observation(1, (0.1,) * 4)])
    tuner.take_event("job", Event("switched", 0))
    tuner.leases.look()
    assert (tuner.status("job").state, tuner.status("job").trial) == ("ended", None)


def test_a_service_of_one_training_ends_the_jobs_that_spoke_to_it(clock: Clock) -> None:
    store = Store("sqlite://")
    others = Tuner(store, clock=clock)
    for job_id in ("other", "taken over", "gone"):
        others.register(job_id, make_spec())
    in_hand = InHand(store)
    tuner = Tuner(store, listeners=[in_hand], clock=clock)
    for job_id in ("tuning", "finished", "ended", "pruned"):
        tuner.register(job_id, make_spec(limits={"max_samples": 2}))
    # Its service was killed and started again in the middle.
    tuner.observe("taken over", 0, [Observation(1, (0.1,) * 4)])
    run(tuner, "finished", Ranks(noise=0.001))
    tuner.take_event("ended", Event("ended", message="in order"))
    store.database.write(text("DELETE FROM jobs WHERE id = 'pruned'"))
    in_hand.end(clock.now)
    in_hand.end(clock.now)
    assert {job.id: (job.phase, job.ended_at is None) for job in stored_jobs(store)} == {
        "other": ("tuning", True),
        "gone": ("tuning", True),
        "taken over": ("ended", False),
        "tuning": ("ended", False),
        "finished": ("finished", False),
        "ended": ("ended", False),
    }
    assert events(tuner, "taken over")[-1] == events(tuner, "finished")[-1] == ("ended", GONE)
    assert events(tuner, "tuning") == [("ended", GONE)]
    assert events(tuner, "ended") == [("ended", "in order")]


def test_a_store_that_fails_does_not_keep_a_service_from_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Store("sqlite://")
    in_hand = InHand(store)
    Tuner(store, listeners=[in_hand]).register("job", make_spec())
    store.database.write(text("DROP TABLE events"))
    in_hand.end(1e10)
    assert "cannot be ended: the store failed" in caplog.text
    assert store.jobs.get("job").phase == "tuning"

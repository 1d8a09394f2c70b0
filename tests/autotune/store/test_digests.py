"""What is read without reading everything, on every database; and whether a job is as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bagua_autotune.model.job import Event, Observation, Trial
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.store import Step, Store, UnknownJob, contacts, digests
from tests.autotune.store.samples import BASELINE, FIRST, PROFILE, RESULT
from tests.autotune.support import make_spec

MEASURED = Step(2.0, 0, Estimate(1.0, 0.1, 5), next_trial=Trial(1, "search", BASELINE))


def observe(store: Store, job: str) -> None:
    """Three steps of trial 0 and one of trial 1, which tells what its ranks computed."""
    store.advance(job, FIRST)
    first = [Observation(step, (0.1, 0.1 * step, None)) for step in (1, 2, 3)]
    store.add_observations(job, 0, first, 1.0)
    store.advance(job, MEASURED)
    store.add_observations(job, 1, [Observation(9, (0.5, 0.4), (0.25, None))], 2.0)


def test_steps_come_without_their_ranks(store: Store, job: str) -> None:
    assert (digests.step_times(store, job), digests.steps(store, job)) == ([], {})
    observe(store, job)
    found = digests.step_times(store, job)
    assert [(time.trial, time.step) for time in found] == [(0, 1), (0, 2), (0, 3), (1, 9)]
    assert [time.slowest for time in found] == pytest.approx([0.1, 0.2, 0.3, 0.5])
    assert digests.steps(store, job)[0] == digests.Steps(1, 3, 3)


def test_the_latest_steps_are_read_alone(store: Store, job: str) -> None:
    observe(store, job)
    assert [o.step for o in digests.latest_observations(store, job, 0, 2)] == [2, 3]
    told = Observation(9, (0.5, 0.4), (0.25, None))
    assert digests.latest_observations(store, job, 1, 20) == [told]
    assert digests.latest_observations(store, job, 7, 20) == []


def test_the_latest_profiles_are_read_alone(store: Store, job: str) -> None:
    assert digests.latest_profiles(store, job, 3) == []
    store.advance(job, FIRST)
    profiles = [PROFILE.model_copy(update={"step": step}) for step in (7, 8, 9)]
    for profile in profiles:
        store.add_profile(job, 0, profile, 1.0)
    store.advance(job, MEASURED)
    assert digests.latest_profiles(store, job, 2) == profiles[1:]
    assert digests.latest_profiles(store, job, 2, trial=1) == []


def test_events_are_summed_up(store: Store, job: str) -> None:
    told = [
        Event("switched", 0, 1, seconds=0.25, at=1.0),
        Event("drift", None, 5, "slower", 0.5, at=2.0),
        Event("switched", 1, 2, seconds=0.5, at=3.0),
        Event("switched", 1, 3, seconds=1.0, at=4.0),
        Event("switched", 2, 4, at=5.0),
        Event("note", 1, seconds=8.0, at=6.0),
    ]
    for event in told:
        store.add_event(job, event)
    assert digests.switch_seconds(store, job) == {0: 0.25, 1: 1.5}
    assert digests.last_event(store, job, "drift") == told[1]
    assert digests.last_event(store, job, "switched") == told[4]
    assert digests.last_event(store, job, "ended") is None
    assert store.events(job, newest=2) == told[-2:]
    assert store.events(job) == told


WRITERS: dict[str, Callable[[Store, str], object]] = {
    "end": lambda store, job: store.end_job(job, 9.0),
    "resume": lambda store, job: store.resume_job(job, 9.0),
    "advance": lambda store, job: store.advance(job, MEASURED),
    "start": lambda store, job: store.start_trial(job, 0, 9.0),
    "observe": lambda store, job: store.add_observations(job, 0, [], 9.0),
    "profile": lambda store, job: store.add_profile(job, 0, PROFILE, 9.0),
    "event": lambda store, job: store.add_event(job, Event("note", at=9.0)),
    "result": lambda store, job: store.replace_result(job, RESULT),
    "estimate": lambda store, job: store.update_estimate(job, 0, Estimate(1.0, 0.1, 5)),
}


def test_whatever_is_written_of_a_job_raises_its_revision(store: Store, job: str) -> None:
    assert store.job(job).revision == 0
    store.advance(job, FIRST)
    for name, write in WRITERS.items():
        before = contacts.of_job(store, job).revision
        write(store, job)
        assert contacts.of_job(store, job).revision == before + 1, name
    before = contacts.of_job(store, job)
    store.touch(job, 99.0)
    assert contacts.of_job(store, job) == before._replace(last_contact_at=99.0)
    finished = Step(9.0, 1, failure="no", result=RESULT)
    assert store.advance(job, finished)
    before = store.job(job).revision
    assert store.open_round(job, 9.0)
    assert store.job(job).revision == before + 1
    store.trials(job)
    assert store.job(job).revision == before + 1


def test_contacts_are_listed_newest_first(store: Store, job: str) -> None:
    for number in range(3):
        store.create_job(f"new{number}", make_spec(name=f"n{number % 2}"), at=10.0 + number)
    assert [c.id for c in contacts.newest(store)] == ["new2", "new1", "new0", "job"]
    assert [c.id for c in contacts.newest(store, "n0")] == ["new2", "new0"]
    assert [c.id for c in contacts.newest(store, limit=1)] == ["new2"]
    assert [c.id for c in contacts.since(store, 11.0)] == ["new2", "new1"]
    found = contacts.of_job(store, job)
    assert (found.name, found.phase, found.version) == ("digits", "tuning", (1.0, 0))
    with pytest.raises(UnknownJob):
        contacts.of_job(store, "nobody")


def test_what_is_read_together_is_one_view(store: Store, job: str) -> None:
    with store.database.reading() as outer:
        with store.database.reading() as inner:
            assert inner is outer
        assert store.job(job).id == job
    with store.database.reading() as later:
        assert later is not outer

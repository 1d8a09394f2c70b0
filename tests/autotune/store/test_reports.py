"""What the ranks tell, on every database."""

from __future__ import annotations

import pytest

from bagua_autotune.model.job import Event, Observation, Trial
from bagua_autotune.model.profile import Profile
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.store import Step, Store, UnknownTrial, digests
from bagua_autotune.store.digests import Steps
from bagua_autotune.store.reports import MOST_PROFILES
from tests.autotune.store.samples import BASELINE, FIRST, PROFILE


def test_observations_are_stored_once(store: Store, job: str) -> None:
    store.advance(job, FIRST)
    first = [Observation(step, (0.1, None)) for step in (1, 2)]
    assert store.add_observations(job, 0, first, 2.0).new == first
    third = Observation(3, (0.9, 0.9))
    again = [third, Observation(2, (0.9, 0.9))]
    assert store.add_observations(job, 0, again, 3.0).new == [third]
    stored = store.observations(job, 0)
    assert [(index, found.step, found.values[0]) for index, found in stored] == [
        (0, 1, 0.1),
        (0, 2, 0.1),
        (0, 3, 0.9),
    ]
    assert store.observations(job) == stored
    assert store.count_observations(job) == 3
    assert store.trial(job, 0).state == "running"
    assert store.job(job).last_contact_at == 3.0


def test_where_each_trial_began_and_ended_is_known(store: Store, job: str) -> None:
    assert digests.steps(store, job) == {}
    store.advance(job, FIRST)
    for step in (12, 10, 11):
        store.add_observations(job, 0, [Observation(step, (0.1,))], 2.0)
    following = Trial(1, "search", BASELINE)
    store.advance(job, Step(2.0, 0, Estimate(1.0, 0.1, 5), next_trial=following))
    assert digests.steps(store, job) == {0: Steps(10, 12, 3)}
    store.add_observations(job, 1, [Observation(20, (0.1,))], 3.0)
    assert digests.steps(store, job) == {0: Steps(10, 12, 3), 1: Steps(20, 20, 1)}


def test_events_come_back_in_order(store: Store, job: str) -> None:
    events = [Event("switched", 0, 10, "", 0.5, 2.0), Event("note", message="grüße", at=3.0)]
    for event in events:
        store.add_event(job, event)
    assert store.events(job) == events


def profile(step: int) -> Profile:
    return PROFILE.model_copy(update={"step": step})


def test_profiles_come_back_by_trial_and_step(store: Store, job: str) -> None:
    store.advance(job, FIRST)
    following = Trial(1, "search", BASELINE)
    store.advance(job, Step(2.0, 0, Estimate(1.0, 0.1, 5), next_trial=following))
    for index, step in ((1, 40), (0, 9), (0, 7)):
        assert store.add_profile(job, index, profile(step), 5.0)
    assert store.profiles(job) == [(0, profile(7)), (0, profile(9)), (1, profile(40))]
    assert store.profiles(job, 1) == [(1, profile(40))]
    assert store.job(job).last_contact_at == 5.0
    assert store.trial(job, 1).state == "proposed"
    with pytest.raises(UnknownTrial):
        store.profiles(job, 2)


def test_a_step_is_profiled_once_and_few_of_a_trial_are(store: Store, job: str) -> None:
    store.advance(job, FIRST)
    steps = (3, 3, *range(10, 20))
    taken = [store.add_profile(job, 0, profile(step), 2.0) for step in steps]
    assert taken == [True, False] + [True] * (MOST_PROFILES - 1) + [False] * 6
    assert [found.step for _, found in store.profiles(job)] == [3, 10, 11, 12, 13]

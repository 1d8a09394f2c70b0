"""What the ranks tell, on every database."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bagua_autotune.model.job import Event, Observation, Trial
from bagua_autotune.model.profile import Profile
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.store import Step, Store, UnknownTrial, digests
from bagua_autotune.store.digests import Steps
from bagua_autotune.store.reports import MOST_EVENTS, MOST_LATE_STEPS, MOST_PROFILES
from tests.autotune.store.samples import BASELINE, FIRST, PROFILE
from tests.autotune.support import make_spec


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


def test_an_event_that_is_sent_again_is_stored_once(store: Store, job: str) -> None:
    store.advance(job, FIRST)
    switched = Event("switched", 0, 7, "", 0.02, 2.0)
    assert store.add_event(job, switched) is None
    assert store.add_event(job, replace(switched, at=3.0)) == 2.0
    others = [replace(switched, step=8), replace(switched, message="x"), Event("note", 0, 7)]
    assert [store.add_event(job, replace(other, at=4.0)) for other in others] == [None] * 3
    assert store.create_job("other", make_spec(), at=1.0)
    assert store.add_event("other", switched) is None
    assert digests.switch_seconds(store, job) == {0: pytest.approx(0.06)}
    # Without a step nobody can tell.
    said = Event("note", message="said", at=5.0)
    assert [store.add_event(job, said) for _ in range(2)] == [None, None]
    assert len(store.events(job)) == 6


def test_events_are_bounded_and_figures_stay(store: Store, job: str) -> None:
    store.advance(job, FIRST)
    for step in range(MOST_EVENTS + 2):
        store.add_event(job, Event("switched", 0, step, "", 1.0, 2.0))
        store.add_event(job, Event("drift", None, step, "", 1.0 * step, 2.0))
    store.add_event(job, Event("note", None, 0, "kept", at=2.0))
    assert digests.switch_seconds(store, job) == {0: MOST_EVENTS}
    last = digests.last_event(store, job, "drift")
    assert last is not None
    assert last.step == MOST_EVENTS + 1
    assert digests.count_events(store, job, "drift") == MOST_EVENTS
    assert len(store.events(job)) == 2 * MOST_EVENTS + 1


def test_a_closed_trial_takes_few_more_steps(store: Store, job: str) -> None:
    store.advance(job, FIRST)
    store.add_observations(job, 0, [Observation(step, (0.1,)) for step in range(10)], 2.0)
    store.advance(
        job, Step(2.0, 0, Estimate(1.0, 0.1, 10), next_trial=Trial(1, "search", BASELINE))
    )
    late = [Observation(step, (0.1,)) for step in range(10, 10 + 2 * MOST_LATE_STEPS)]
    assert len(store.add_observations(job, 0, late[:30], 3.0).new) == 30
    assert store.add_observations(job, 0, late, 3.0).new == late[30:MOST_LATE_STEPS]
    assert store.add_observations(job, 0, late, 3.0).new == []
    assert store.count_observations(job) == 10 + MOST_LATE_STEPS
    of_next = [Observation(step, (0.1,)) for step in range(500, 500 + 2 * MOST_LATE_STEPS)]
    assert store.add_observations(job, 1, of_next, 4.0).new == of_next

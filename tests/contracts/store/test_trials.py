"""Trials and what follows them: what the ranks report of one, profiled steps, and events."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from bagua_autotune.model.job import Event, Observation, Trial
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.store import Store
from bagua_autotune.store.errors import UnknownTrial
from bagua_autotune.store.events import MOST_EVENTS, MOST_PROFILES
from bagua_autotune.store.observations import MOST_LATE_STEPS, Steps
from bagua_autotune.store.trials import Move
from bagua_wire.configuration import Configuration
from bagua_wire.profile import Profile
from tests.autotune.store.samples import (
    BASELINE,
    FIRST,
    MEASURED,
    PROFILE,
    RESULT,
    with_buckets_of_its_own,
)
from tests.autotune.support import make_spec


def test_a_trial_runs_is_measured_and_followed(store: Store, job: str) -> None:
    assert store.trials.advance(job, FIRST)
    assert store.trials.get(job, 0) == Trial(0, "search", BASELINE)
    store.trials.start(job, 0, 2.0)
    assert store.trials.get(job, 0).state == "running"
    estimate = Estimate(-1.5, math.inf, 9, 1)
    other = Configuration(BASELINE, bucket_bytes=4 << 20)
    following = Trial(1, "confirm", other)
    assert store.trials.advance(job, Move(3.0, closes=0, estimate=estimate, next_trial=following))
    first, second = store.trials.of(job)
    assert (first.state, first.estimate) == ("measured", estimate)
    assert (first.started_at, first.ended_at) == (2.0, 3.0)
    assert (second, store.jobs.get(job).phase) == (following, "confirming")
    assert store.trials.advance(job, Move(4.0, closes=1, failure="they disagreed", result=RESULT))
    assert store.trials.get(job, 1).failure == "they disagreed"
    assert (store.jobs.get(job).phase, store.jobs.get(job).result) == ("finished", RESULT)


def test_a_step_decided_on_an_old_view_changes_nothing(store: Store, job: str) -> None:
    assert store.trials.advance(job, FIRST)
    closing = Move(2.0, 0, Estimate(1.0, 0.1, 5), next_trial=Trial(1, "search", BASELINE))
    assert not store.trials.advance(job, FIRST)
    assert store.trials.advance(job, closing)
    before = store.trials.of(job)
    assert not store.trials.advance(job, closing)
    assert not store.trials.advance(job, replace(closing, closes=1))
    assert store.trials.of(job) == before
    store.jobs.end(job, 3.0)
    assert not store.trials.advance(
        job, replace(closing, closes=1, next_trial=Trial(2, "search", BASELINE))
    )


def test_what_follows_a_trial_may_be_open_before_it_is_measured(store: Store, job: str) -> None:
    assert store.trials.advance(job, FIRST)
    following = Trial(1, "search", Configuration(BASELINE, bucket_bytes=4 << 20))
    ahead = Move(3.0, next_trial=following, leaves=0)
    store.trials.start(job, 0, 2.0)
    assert store.trials.advance(job, ahead)
    assert not store.trials.advance(job, ahead)
    assert [trial.state for trial in store.trials.of(job)] == ["running", "proposed"]
    estimate = Estimate(-1.5, 0.01, 3)
    assert store.trials.close_left(job, 0, estimate, 4.0)
    assert not store.trials.close_left(job, 0, replace(estimate, center=-1.0), 5.0)
    first, second = store.trials.of(job)
    assert (first.state, first.estimate, first.ended_at) == ("measured", estimate, 4.0)
    assert second == following
    # What fails after its ranks were told what follows is closed alone.
    last = Trial(2, "search", BASELINE)
    assert store.trials.advance(job, Move(5.0, next_trial=last, leaves=1))
    assert store.trials.advance(job, Move(6.0, closes=1, failure="they disagreed"))
    assert not store.trials.advance(job, Move(7.0, closes=1, failure="again"))
    _, second, third = store.trials.of(job)
    assert (second.state, second.failure) == ("failed", "they disagreed")
    assert third == last


def test_an_explicit_list_of_buckets_survives_storing(store: Store) -> None:
    spec = make_spec(**with_buckets_of_its_own())
    assert store.jobs.create("job", spec, at=1.0)
    assert not store.jobs.create("job", spec, at=2.0)
    chosen = Configuration(spec.default_configuration, buckets=(100, 150))
    store.trials.advance("job", Move(1.0, next_trial=Trial(0, "search", chosen)))
    assert store.trials.get("job", 0).configuration == chosen
    result = replace(RESULT, configuration=chosen, payback_steps=12, cost_steps=1.5)
    store.trials.advance("job", Move(2.0, 0, Estimate(1.0, 0.1, 5), result=result))
    assert (store.jobs.get("job").result, store.jobs.get("job").space) == (result, spec.knobs)


def test_of_many_that_take_the_same_step_one_does(store: Store, job: str) -> None:
    with ThreadPoolExecutor(6) as threads:
        took = [threads.submit(store.trials.advance, job, FIRST) for _ in range(6)]
    assert sorted(each.result() for each in took) == [False] * 5 + [True]
    assert len(store.trials.of(job)) == 1


def observe(store: Store, job: str) -> None:
    """Three steps of trial 0 and one of trial 1, which tells what its ranks computed."""
    store.trials.advance(job, FIRST)
    first = [Observation(step, (0.1, 0.1 * step, None)) for step in (3, 1, 2)]
    store.observations.add(job, 0, first, 1.0)
    store.trials.advance(job, MEASURED)
    store.observations.add(job, 1, [Observation(9, (0.5, 0.4), (0.25, None))], 2.0)


def test_observations_are_stored_once(store: Store, job: str) -> None:
    store.trials.advance(job, FIRST)
    first = [Observation(step, (0.1, None)) for step in (1, 2)]
    assert store.observations.add(job, 0, first, 2.0).new == first
    third = Observation(3, (0.9, 0.9))
    again = [third, Observation(2, (0.9, 0.9))]
    assert store.observations.add(job, 0, again, 3.0).new == [third]
    stored = store.observations.of(job, 0)
    told = [(index, found.step, found.values[0]) for index, found in stored]
    assert told == [(0, 1, 0.1), (0, 2, 0.1), (0, 3, 0.9)]
    assert store.observations.of(job) == stored
    assert store.trials.get(job, 0).state == "running"
    assert store.jobs.get(job).last_contact_at == 3.0


def test_a_closed_trial_takes_few_more_steps(store: Store, job: str) -> None:
    store.trials.advance(job, FIRST)
    store.observations.add(job, 0, [Observation(step, (0.1,)) for step in range(10)], 2.0)
    store.trials.advance(
        job, Move(2.0, 0, Estimate(1.0, 0.1, 10), next_trial=Trial(1, "search", BASELINE))
    )
    late = [Observation(step, (0.1,)) for step in range(10, 10 + 2 * MOST_LATE_STEPS)]
    assert len(store.observations.add(job, 0, late[:30], 3.0).new) == 30
    assert store.observations.add(job, 0, late, 3.0).new == late[30:MOST_LATE_STEPS]
    assert store.observations.add(job, 0, late, 3.0).new == []
    assert len(store.observations.of(job)) == 10 + MOST_LATE_STEPS
    of_next = [Observation(step, (0.1,)) for step in range(500, 500 + 2 * MOST_LATE_STEPS)]
    assert store.observations.add(job, 1, of_next, 4.0).new == of_next


def test_steps_come_without_their_ranks_and_the_latest_alone(store: Store, job: str) -> None:
    assert (store.observations.step_times(job), store.observations.steps(job)) == ([], {})
    observe(store, job)
    found = store.observations.step_times(job)
    assert [(time.trial, time.step) for time in found] == [(0, 1), (0, 2), (0, 3), (1, 9)]
    assert [time.slowest for time in found] == pytest.approx([0.1, 0.2, 0.3, 0.5])
    assert store.observations.steps(job) == {0: Steps(1, 3, 3), 1: Steps(9, 9, 1)}
    assert [o.step for o in store.observations.latest(job, 0, 2)] == [2, 3]
    told = Observation(9, (0.5, 0.4), (0.25, None))
    assert store.observations.latest(job, 1, 20) == [told]
    assert store.observations.latest(job, 7, 20) == []


def test_a_page_begins_behind_the_key_of_the_one_before(store: Store, job: str) -> None:
    store.trials.advance(job, FIRST)
    store.observations.add(job, 0, [Observation(step, (0.1,)) for step in (8, 9)], 2.0)
    store.trials.advance(
        job, Move(2.0, 0, Estimate(1.0, 0.1, 2), next_trial=Trial(1, "search", BASELINE))
    )
    store.observations.add(job, 1, [Observation(step, (0.1,)) for step in (1, 2)], 2.0)
    for text in "abc":
        store.events.add(job, Event("note", message=text))

    def keys(limit: int, after: tuple[int, int] | None, index: int | None) -> list[tuple[int, int]]:
        found = store.observations.of(job, index, after, limit)
        return [(trial, observation.step) for trial, observation in found]

    assert keys(3, None, None) == [(0, 8), (0, 9), (1, 1)]
    assert keys(3, (0, 8), None) == [(0, 9), (1, 1), (1, 2)]
    assert keys(3, (0, 8), 0) == [(0, 9)]
    (first, a), (second, _) = store.events.after(job, 0, 2)
    assert a.message == "a"
    assert [event.message for _, event in store.events.after(job, first, 2)] == ["b", "c"]
    assert [event.message for _, event in store.events.after(job, second, 2)] == ["c"]


def profile(step: int) -> Profile:
    return replace(PROFILE, step=step)


def test_profiles_come_back_by_trial_and_step(store: Store, job: str) -> None:
    store.trials.advance(job, FIRST)
    following = Trial(1, "search", BASELINE)
    store.trials.advance(job, Move(2.0, 0, Estimate(1.0, 0.1, 5), next_trial=following))
    for index, step in ((0, 9), (1, 40), (0, 7)):
        assert store.profiles.add(job, index, profile(step), 5.0)
    assert store.profiles.of(job) == [(0, profile(7)), (0, profile(9)), (1, profile(40))]
    assert store.profiles.of(job, 1) == [(1, profile(40))]
    assert store.jobs.get(job).last_contact_at == 5.0
    assert store.profiles.latest(job, 2) == [profile(40)], "of the newest trial"
    assert store.profiles.latest(job, 2, trial=0) == [profile(7), profile(9)]
    assert store.profiles.latest(job, 1, trial=0) == [profile(9)]
    assert store.trials.get(job, 1).state == "proposed"
    with pytest.raises(UnknownTrial):
        store.profiles.of(job, 2)


def test_a_step_is_profiled_once_and_few_of_a_trial_are(store: Store, job: str) -> None:
    store.trials.advance(job, FIRST)
    steps = (3, 3, *range(10, 20))
    taken = [store.profiles.add(job, 0, profile(step), 2.0) for step in steps]
    assert taken == [True, False] + [True] * (MOST_PROFILES - 1) + [False] * 6
    assert [found.step for _, found in store.profiles.of(job)] == [3, 10, 11, 12, 13]


def test_events_come_back_in_order_and_are_summed_up(store: Store, job: str) -> None:
    told = [
        Event("switched", 0, 1, seconds=0.25, at=1.0),
        Event("drift", None, 5, "slower", 0.5, at=2.0),
        Event("switched", 1, 2, seconds=0.5, at=3.0),
        Event("switched", 1, 3, seconds=1.0, at=4.0),
        Event("switched", 2, 4, at=5.0),
        Event("note", 1, message="grüße", seconds=8.0, at=6.0),
    ]
    for event in told:
        store.events.add(job, event)
    assert store.events.switch_seconds(job) == {0: 0.25, 1: 1.5}
    assert store.events.of(job, 1, "drift") == [told[1]]
    assert store.events.of(job, 1, "switched") == [told[4]]
    assert store.events.of(job, kind="ended") == []
    assert store.events.of(job, newest=2) == told[-2:]
    assert store.events.of(job) == told


def test_an_event_that_is_sent_again_is_stored_once(store: Store, job: str) -> None:
    store.trials.advance(job, FIRST)
    switched = Event("switched", 0, 7, "", 0.02, 2.0)
    assert store.events.add(job, switched) is None
    assert store.events.add(job, replace(switched, at=3.0)) == 2.0
    others = [replace(switched, step=8), replace(switched, message="x"), Event("note", 0, 7)]
    assert [store.events.add(job, replace(other, at=4.0)) for other in others] == [None] * 3
    assert store.jobs.create("other", make_spec(), at=1.0)
    assert store.events.add("other", switched) is None
    assert store.events.switch_seconds(job) == {0: pytest.approx(0.06)}
    # Without a step nobody can tell.
    said = Event("note", message="said", at=5.0)
    assert [store.events.add(job, said) for _ in range(2)] == [None, None]
    assert len(store.events.of(job)) == 6


def test_events_are_bounded_and_figures_stay(store: Store, job: str) -> None:
    store.trials.advance(job, FIRST)
    for step in range(MOST_EVENTS + 2):
        store.events.add(job, Event("switched", 0, step, "", 1.0, 2.0))
        store.events.add(job, Event("drift", None, step, "", 1.0 * step, 2.0))
    store.events.add(job, Event("note", None, 0, "kept", at=2.0))
    assert store.events.switch_seconds(job) == {0: MOST_EVENTS}
    (last,) = store.events.of(job, 1, "drift")
    assert last.step == MOST_EVENTS + 1
    assert store.events.count(job, "drift") == MOST_EVENTS
    assert len(store.events.of(job)) == 2 * MOST_EVENTS + 1

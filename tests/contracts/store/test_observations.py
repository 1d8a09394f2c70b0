"""What the ranks report of a trial."""

from __future__ import annotations

import pytest

from bagua_autotune.model.job import Event, Observation, Trial
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.store import Store
from bagua_autotune.store.observations import MOST_LATE_STEPS, Steps
from bagua_autotune.store.trials import Move
from tests.autotune.store.samples import BASELINE, FIRST, MEASURED


def observe(store: Store, job: str) -> None:
    """Three steps of trial 0 and one of trial 1, which tells what its ranks computed."""
    store.trials.advance(job, FIRST)
    first = [Observation(step, (0.1, 0.1 * step, None)) for step in (1, 2, 3)]
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
    assert [(index, found.step, found.values[0]) for index, found in stored] == [
        (0, 1, 0.1),
        (0, 2, 0.1),
        (0, 3, 0.9),
    ]
    assert store.observations.of(job) == stored
    assert len(store.observations.of(job)) == 3
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


def test_where_each_trial_began_and_ended_is_known(store: Store, job: str) -> None:
    assert store.observations.steps(job) == {}
    store.trials.advance(job, FIRST)
    for step in (12, 10, 11):
        store.observations.add(job, 0, [Observation(step, (0.1,))], 2.0)
    following = Trial(1, "search", BASELINE)
    store.trials.advance(job, Move(2.0, 0, Estimate(1.0, 0.1, 5), next_trial=following))
    assert store.observations.steps(job) == {0: Steps(10, 12, 3)}
    store.observations.add(job, 1, [Observation(20, (0.1,))], 3.0)
    assert store.observations.steps(job) == {0: Steps(10, 12, 3), 1: Steps(20, 20, 1)}


def test_steps_come_without_their_ranks(store: Store, job: str) -> None:
    assert (store.observations.step_times(job), store.observations.steps(job)) == ([], {})
    observe(store, job)
    found = store.observations.step_times(job)
    assert [(time.trial, time.step) for time in found] == [(0, 1), (0, 2), (0, 3), (1, 9)]
    assert [time.slowest for time in found] == pytest.approx([0.1, 0.2, 0.3, 0.5])
    assert store.observations.steps(job)[0] == Steps(1, 3, 3)


def test_the_latest_steps_are_read_alone(store: Store, job: str) -> None:
    observe(store, job)
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

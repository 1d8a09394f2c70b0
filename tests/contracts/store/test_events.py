"""Events."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bagua_autotune.model.job import Event
from bagua_autotune.store import Store
from bagua_autotune.store.events import MOST_EVENTS
from tests.autotune.store.samples import FIRST
from tests.autotune.support import make_spec


def test_events_come_back_in_order(store: Store, job: str) -> None:
    events = [Event("switched", 0, 10, "", 0.5, 2.0), Event("note", message="grüße", at=3.0)]
    for event in events:
        store.events.add(job, event)
    assert store.events.of(job) == events


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

"""Pages, on every database."""

from __future__ import annotations

from bagua_autotune.model.job import Event, Observation, Trial
from bagua_autotune.model.statistics import Estimate
from bagua_autotune.store import Step, Store, contacts
from bagua_autotune.store.reports import ObservationKey
from tests.autotune.store.samples import BASELINE, FIRST
from tests.autotune.support import make_spec


def test_a_page_begins_behind_the_key_of_the_one_before(store: Store, job: str) -> None:
    store.advance(job, FIRST)
    store.add_observations(job, 0, [Observation(step, (0.1,)) for step in (8, 9)], 2.0)
    store.advance(job, Step(2.0, 0, Estimate(1.0, 0.1, 2), next_trial=Trial(1, "search", BASELINE)))
    store.add_observations(job, 1, [Observation(step, (0.1,)) for step in (1, 2)], 2.0)
    for text in "abc":
        store.add_event(job, Event("note", message=text))

    def keys(limit: int, after: ObservationKey | None, index: int | None) -> list[tuple[int, int]]:
        found = store.observations(job, index, after, limit)
        return [(trial, observation.step) for trial, observation in found]

    assert keys(3, None, None) == [(0, 8), (0, 9), (1, 1)]
    assert keys(3, ObservationKey(0, 8), None) == [(0, 9), (1, 1), (1, 2)]
    assert keys(3, ObservationKey(0, 8), 0) == [(0, 9)]
    (first, a), (second, _) = store.events_after(job, 0, 2)
    assert a.message == "a"
    assert [event.message for _, event in store.events_after(job, first, 2)] == ["b", "c"]
    assert [event.message for _, event in store.events_after(job, second, 2)] == ["c"]


def test_jobs_of_the_same_moment_are_listed_once(store: Store) -> None:
    for number in range(3):
        store.create_job(f"job{number}", make_spec(), at=0.1 + 0.2)
    assert [job.id for job in contacts.newest(store, limit=2)] == ["job0", "job1"]
    assert [job.id for job in contacts.newest(store, after="job1")] == ["job2"]

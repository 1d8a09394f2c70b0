"""A job that is deleted, on every database."""

from __future__ import annotations

import threading
import time

import pytest
from sqlalchemy import select

from bagua_autotune.model.job import SILENT_SECONDS, Event, Observation
from bagua_autotune.store import Store
from bagua_autotune.store.engine.tables import (
    EventRow,
    LifeRow,
    ObservationRow,
    ProfileRow,
    TrialRow,
)
from bagua_autotune.store.errors import JobLives, UnknownJob
from bagua_autotune.store.lives import Place
from bagua_autotune.store.maintenance import retention
from bagua_autotune.store.maintenance.retention import delete_training
from bagua_autotune.tuning.tuner import Tuner
from tests.autotune.store.samples import FIRST, PROFILE
from tests.autotune.support import Later, make_spec, stored_jobs


def make_job(store: Store, job_id: str, at: float, *, has_ended: bool = False) -> None:
    """One with something in each table."""
    assert store.jobs.create(job_id, make_spec(), at=at)
    store.trials.advance(job_id, FIRST)
    observations = [Observation(step, (0.1,) * 4) for step in range(20)]
    store.observations.add(job_id, 0, observations, at)
    store.profiles.add(job_id, 0, PROFILE, at)
    if has_ended:
        store.jobs.end_gone([job_id], Event("ended", at=at))


def test_all_that_is_stored_of_a_job_goes_and_nothing_else(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "ROWS_AT_ONCE", 7)
    now = time.time()
    make_job(store, "gone", now, has_ended=True)
    make_job(store, "kept", now, has_ended=True)
    (deleted,) = delete_training(store, "gone").jobs
    assert (deleted.id, deleted.name, deleted.state) == ("gone", "digits", "ended")
    assert [job.id for job in stored_jobs(store)] == ["kept"]
    for table in (TrialRow, ProfileRow, EventRow):
        assert len(store.database.read(select(table.id))) == 1
    assert len(store.database.read(select(ObservationRow.id))) == 20
    for unknown in ("gone", "never"):
        with pytest.raises(UnknownJob):
            delete_training(store, unknown)


@pytest.mark.parametrize("given", ["first", "second"])
def test_all_lives_of_a_training_go(store: Store, given: str) -> None:
    now = time.time()
    make_job(store, "first", now, has_ended=True)
    make_job(store, "second", now, has_ended=True)
    store.lives.enter("second", Place("first", "first", 2))
    assert [job.id for job in delete_training(store, given).jobs] == ["first", "second"]
    assert store.database.read(select(LifeRow.job_id)) == []


def test_one_whose_training_may_run_stays_unless_forced(store: Store) -> None:
    now = time.time()
    make_job(store, "first", now, has_ended=True)
    make_job(store, "lives", now - 60)
    store.lives.enter("lives", Place("first", "first", 2))
    for given in ("first", "lives"):
        with pytest.raises(JobLives, match=r"job lives may still run: it was heard of .* ago\. "):
            delete_training(store, given)
    assert len(stored_jobs(store)) == 2
    assert len(store.observations.of("lives")) == 20
    assert len(delete_training(store, "lives", force=True).jobs) == 2
    make_job(store, "silent", now - SILENT_SECONDS - 1)
    assert len(delete_training(store, "silent").jobs) == 1


def test_bagua_s_own_workers_keep_the_job_without_which_they_fail(store: Store) -> None:
    store.jobs.create("job", make_spec(), at=time.time(), protocol="v1", data={"family": "f"})
    with pytest.raises(JobLives, match="Bagua's own workers would fail"):
        delete_training(store, "job", force=True)
    assert stored_jobs(store)


def test_of_two_replicas_one_deletes_it(store: Store) -> None:
    make_job(store, "job", time.time(), has_ended=True)
    barrier, found = threading.Barrier(2), []

    def ask() -> None:
        barrier.wait()
        try:
            found.append(len(delete_training(store, "job").jobs))
        except UnknownJob:
            found.append(0)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0, 1]


def test_a_decision_about_a_job_that_was_just_deleted_is_none(store: Store) -> None:
    """Another replica deleted it while this one began to decide."""
    later = Later()
    tuner = Tuner(store, background=later)
    tuner.register("job", make_spec())
    tuner.take_event("job", Event("switched", 0, 1))
    assert later.is_busy("job")
    delete_training(store, "job", force=True)
    later.finish()
    with pytest.raises(UnknownJob):
        tuner.ask("job")

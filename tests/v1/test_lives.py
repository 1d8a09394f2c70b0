"""Runs that die and begin anew, models that look alike, and processes that outlive their run."""

from __future__ import annotations

import json

import pytest
from sqlalchemy import delete

from bagua_autotune.model.job import SILENT_SECONDS
from bagua_autotune.store.engine.tables import JobRow
from bagua_autotune.tuning.tuner import Tuner
from tests.autotune.support import Clock, stored_jobs
from tests.v1.worker import (
    BEST,
    MIB,
    TENSORS,
    Worker,
    cycle,
    cycles,
    enter,
    finish,
    peaked,
    processes,
    ranks_of,
    run,
    tuning,
)

pytestmark = pytest.mark.slow


def test_a_run_that_was_paused_for_long_goes_on(store):
    """Its ranks may run a slow trial; they are never left at it."""
    clock = Clock()
    service = tuning(store, searcher="bayesian", clock=clock)
    workers = ranks_of(service)
    cycles(workers, 100, 1500)
    (job,) = stored_jobs(store)
    clock.now += 2 * SILENT_SECONDS
    Tuner(store, clock=clock).leases.look()
    assert store.jobs.get(job.id).phase == "lost"
    finish(workers, 1500)
    assert store.jobs.get(job.id).phase == "finished"
    assert peaked(0, workers[0].running) == BEST


@pytest.mark.parametrize("is_named_by_address", [False, True])
def test_a_run_begun_anew_goes_on_with_the_job_and_in_the_end_with_its_choice(
    store, is_named_by_address
):
    service = tuning(store, searcher="bayesian")

    def life() -> list[Worker]:
        if is_named_by_address:
            return processes(service)[0]
        return [Worker(service, "net", rank, peaked) for rank in range(2)]

    first = life()
    enter(first)
    cycles(first, 100, 1500)
    (job,) = stored_jobs(store)
    before = store.trials.of(job.id)
    assert len(before) > 2

    second = life()
    run(second)
    final = second[0].running
    assert peaked(0, final) == BEST
    assert store.trials.of(job.id)[: len(before) - 1] == before[:-1]
    assert len(store.trials.of(job.id)) > len(before)

    third = life()
    assert run(third) == 200
    assert third[0].running == final
    assert [other.id for other in stored_jobs(store)] == [job.id]


def test_a_process_that_outlives_its_run_stops_the_tuning_and_parts_nobody(store, caplog):
    service = tuning(store)
    (complete,), (first,), (second,) = (processes(service) for _ in range(3))
    enter(complete)
    cycles(complete, 100, 1500)
    (job,) = stored_jobs(store)
    before = len(store.trials.of(job.id))
    for workers in (first, second):
        enter(workers)
    first[0].report(100)
    first[0].ask(100)
    for iteration in range(100, 2000, 100):
        cycle(second[::-1], iteration)
        assert second[0].running["bucket_size"] == 10 * MIB
    (warning,) = caplog.messages
    assert "different iterations" in warning
    assert len(store.trials.of(job.id)) == before > 2


def test_two_that_outlive_theirs_do_so_even_where_no_model_lacks_a_rank(store):
    service = tuning(store)
    (old,) = processes(service)
    twins = processes(service, models=2)
    for workers in (old, *twins):
        enter(workers)
    ranks = [[old[0], twins[0][0], twins[1][0]], [twins[0][1], twins[1][1], old[1]]]
    for workers in ranks:
        for worker in workers:
            worker.report(100)
            worker.ask(100)
    for iteration in range(200, 2000, 100):
        for workers in twins:
            cycle(workers, iteration)
    assert all(trial.index == 0 for job in stored_jobs(store) for trial in store.trials.of(job.id))


def test_twins_are_two_jobs_whatever_their_pace(store):
    service = tuning(store, searcher="bayesian")
    often, seldom = processes(service, models=2)
    enter(often)
    enter(seldom)
    for iteration in range(100, 20_000, 100):
        if not often[0].is_completed:
            cycle(often, iteration)
        if iteration % 300 == 0:
            cycle(seldom, iteration // 3)
            if seldom[0].is_completed:
                break
    assert [peaked(0, twin[0].running) for twin in (often, seldom)] == [BEST] * 2
    assert [job.phase for job in stored_jobs(store)] == ["finished"] * 2


def test_the_same_name_with_other_tensors_is_a_new_job(store):
    service = tuning(store)
    service.register("net", TENSORS)
    service.ask("net", 0, 0)
    text = service.register("net", TENSORS[:2])
    wire = json.loads(text)
    assert len([member for bucket in wire["buckets"] for member in bucket]) == 2
    assert service.ask("net", 0, 0)[0] == text
    assert sorted(job.phase for job in stored_jobs(store)) == ["ended", "tuning"]
    service.register("net", TENSORS)
    assert len(json.loads(service.ask("net", 0, 0)[0])["buckets"]) > len(wire["buckets"])
    assert len(stored_jobs(store)) == 2


def test_ranks_may_register_the_tensors_in_any_order(store):
    first, second = tuning(store), tuning(store)
    assert first.register("net", TENSORS) == second.register("net", TENSORS[::-1])
    assert len(stored_jobs(store)) == 1


@pytest.mark.parametrize(
    "other", [{"world_size": 4}, {"world_size": None}, {"default_bucket_bytes": 7 * MIB}]
)
def test_a_service_started_otherwise_does_not_give_an_old_run_s_choice(store, other):
    run([Worker(tuning(store), "net", rank, peaked) for rank in range(2)])
    service = tuning(store, **other)
    workers = ranks_of(service)
    cycles(workers, 100, 300)
    assert not workers[0].is_completed
    assert workers[0].running["bucket_size"] == other.get("default_bucket_bytes", 10 * MIB)
    assert sorted(job.phase for job in stored_jobs(store))[0] == "finished"


def test_a_job_that_was_removed_is_made_again(store):
    service = tuning(store)
    twins = processes(service, models=2)
    for twin in twins:
        enter(twin)
    for iteration in (100, 200):
        for twin in twins:
            cycle(twin, iteration)
    second = stored_jobs(store)[0].id
    store.database.write(delete(JobRow).where(JobRow.id == second))
    for iteration in range(300, 1500, 100):
        for twin in twins:
            cycle(twin, iteration)
    assert len(stored_jobs(store)) == 2

"""Transactions of a store: views, failures, and that what is stored is exactly what was told."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
from sqlalchemy import bindparam, event, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import Pool

from bagua_autotune.model.job import Observation
from bagua_autotune.store import Store
from bagua_autotune.store.engine.tables import JobRow
from bagua_autotune.store.errors import UnknownTrial
from tests.autotune.store.samples import FIRST

RENAME = update(JobRow).where(JobRow.id == bindparam("of_job")).values(name=bindparam("new_name"))


@pytest.fixture(autouse=True)
def first_trial(store: Store, job: str) -> None:
    store.trials.advance(job, FIRST)


def test_what_fails_in_the_middle_leaves_nothing_behind(store: Store, job: str) -> None:
    before = store.jobs.contact(job)
    with pytest.raises(UnknownTrial):
        store.observations.add(job, 7, [Observation(1, (0.1,) * 4)], at=9.0)
    assert store.jobs.contact(job) == before
    store.jobs.touch(job, 3.0)  # the connection is in order


def test_an_error_of_the_database_is_one_of_sqlalchemy(store: Store, job: str) -> None:
    before = store.database.errors
    with pytest.raises(DBAPIError):
        store.database.write(RENAME, of_job=job, new_name=None)
    assert store.database.errors > before
    store.database.write(RENAME, of_job=job, new_name="other")
    assert store.jobs.get(job).name == "other"


def test_many_steps_of_a_report_are_stored_exactly(store: Store, job: str) -> None:
    steps = [
        Observation(2**53 - step, (0.1 + step / 3, 1e-9), (1 / 3, 1e-300), 1e18 / 7)
        for step in range(50, 0, -1)
    ]
    steps += [Observation(2**53, (0.25, 1 / 7))]
    costs = [step.values[0] for step in steps]
    store.observations.add(job, 0, steps, at=2.0, weigh=lambda _job, _trial: costs)
    assert [found for _, found in store.observations.of(job, 0)] == steps
    assert [cost.cost for cost in store.observations.step_costs(job, 0)] == costs
    assert [cost.complexity for cost in store.observations.step_costs(job, 0)][-1] is None


def test_no_connection_keeps_the_rows_that_it_was_asked_for_last(store: Store, job: str) -> None:
    """Each has dozens of statements, whose rows may be all steps of a job."""
    value = 0.123456789
    steps = [Observation(step, (value,) * 4) for step in range(3)]
    store.observations.add(job, 0, steps, at=2.0)
    assert len(store.observations.of(job)) == 3
    kept = [
        row
        for each in gc.get_objects()
        if type(each) is list and each and isinstance(row := each[0], list | tuple)
        if any(type(cell) is str and str(value) in cell for cell in row)
    ]
    assert kept == []


def test_a_statement_within_a_view_sees_that_view(store: Store, job: str) -> None:
    with store.database.reading():
        assert store.jobs.get(job).name == store.jobs.contact(job).name


def test_a_view_stays_as_it_was_when_it_was_opened(store: Store, job: str) -> None:
    if not store.database.url.database:
        pytest.skip("a database in memory has one connection: writers wait for readers")
    with store.database.reading(), ThreadPoolExecutor(1) as writer:
        before = store.jobs.get(job)
        writer.submit(store.jobs.touch, job, 99.0).result()
        assert store.jobs.get(job) == before
    assert store.jobs.get(job).last_contact_at == 99.0


def test_what_is_read_together_is_one_view(store: Store, job: str) -> None:
    lent = mock.Mock(return_value=None)
    event.listen(Pool, "checkout", lent)
    try:
        with store.database.reading():
            with store.database.reading():
                assert store.jobs.get(job).id == job
            assert store.jobs.contact(job).id == job
        assert lent.call_count == 1
        store.jobs.get(job)
        assert lent.call_count == 2
    finally:
        event.remove(Pool, "checkout", lent)

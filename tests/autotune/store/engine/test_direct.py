"""Statements on the driver's own connections: what is lost is noticed, and done again."""

from __future__ import annotations

import gc

import pytest
from sqlalchemy import bindparam, create_engine, func, select, text, update
from sqlalchemy.exc import DBAPIError

from bagua_autotune.model.job import Observation
from bagua_autotune.store import Store
from bagua_autotune.store.engine.database import Statement
from bagua_autotune.store.engine.postgresql import RETRY_SECONDS, Circuit
from bagua_autotune.store.engine.tables import JobRow
from bagua_autotune.store.errors import UnknownTrial
from tests.autotune.store.samples import FIRST
from tests.autotune.support import make_spec

END_CONNECTIONS = text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
)
RENAME = Statement(
    update(JobRow).where(JobRow.id == bindparam("of_job")).values(name=bindparam("new_name"))
)


@pytest.fixture
def store(every_store: Store) -> Store:
    return every_store


@pytest.fixture
def job(store: Store) -> str:
    store.create_job("job", make_spec(), at=1.0)
    store.advance("job", FIRST)
    return "job"


def end_connections(url: str) -> None:
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(END_CONNECTIONS)
    engine.dispose()


def test_whoever_meets_a_lost_connection_is_served_by_a_new_one(postgresql_url: str) -> None:
    store = Store(postgresql_url)
    with store.database.reading() as first, store.database.writing() as second:
        first.connection(), second.connection()  # two lie in the pool then
    store.create_job("lost", make_spec(), at=1.0)
    store.advance("lost", FIRST)
    for step in range(3):
        end_connections(postgresql_url)
        store.add_observations("lost", 0, [Observation(step, (0.1,) * 4)], at=2.0)
        end_connections(postgresql_url)
        assert store.contact("lost").last_contact_at == 2.0
        end_connections(postgresql_url)
        assert store.job("lost").id == "lost"
        end_connections(postgresql_url)
        with store.database.reading() as session:
            assert session.scalar(select(func.count()).where(JobRow.id == "lost")) == 1
    assert [step.step for _, step in store.observations("lost")] == [0, 1, 2]
    store.close()


def test_whoever_may_try_after_a_failure_is_served_by_a_new_connection(postgresql_url: str) -> None:
    store = Store(postgresql_url)
    now = [0.0]
    store.database._circuit = Circuit(lambda: now[0])
    store.create_job("tried", make_spec(), at=1.0)
    store.contact("tried")
    end_connections(postgresql_url)
    store.database._circuit.failed()
    now[0] = RETRY_SECONDS
    assert store.contact("tried").id == "tried"
    assert store.job("tried").id == "tried", "all others may ask, too"
    store.close()


def test_what_fails_in_the_middle_leaves_nothing_behind(store: Store, job: str) -> None:
    before = store.contact(job)
    with pytest.raises(UnknownTrial):
        store.add_observations(job, 7, [Observation(1, (0.1,) * 4)], at=9.0)
    assert store.contact(job) == before
    store.touch(job, 3.0)  # the connection is in order


def test_an_error_of_the_database_is_one_of_sqlalchemy(store: Store, job: str) -> None:
    before = store.database.errors
    with pytest.raises(DBAPIError):
        store.database.tell(RENAME, of_job=job, new_name=None)
    assert store.database.errors > before
    store.database.tell(RENAME, of_job=job, new_name="other")
    assert store.job(job).name == "other"


def test_many_steps_of_a_report_are_stored_exactly(store: Store, job: str) -> None:
    steps = [
        Observation(2**53 - step, (0.1 + step / 3, 1e-9), (1 / 3, 1e-300), 1e18 / 7)
        for step in range(50, 0, -1)
    ]
    steps += [Observation(2**53, (0.25, 1 / 7))]
    costs = [step.values[0] for step in steps]
    store.add_observations(job, 0, steps, at=2.0, weigh=lambda _job, _trial: costs)
    assert [found for _, found in store.observations(job, 0)] == steps
    assert [cost.cost for cost in store.step_costs(job, 0)] == costs
    assert [cost.complexity for cost in store.step_costs(job, 0)][-1] is None


def test_no_connection_keeps_the_rows_that_it_was_asked_for_last(store: Store, job: str) -> None:
    """Each has dozens of statements, whose rows may be all steps of a job."""
    value = 0.123456789
    steps = [Observation(step, (value,) * 4) for step in range(3)]
    store.add_observations(job, 0, steps, at=2.0)
    assert len(store.observations(job)) == 3
    kept = [
        row
        for each in gc.get_objects()
        if type(each) is list and each and isinstance(row := each[0], list | tuple)
        if any(type(cell) is str and str(value) in cell for cell in row)
    ]
    assert kept == []


def test_a_statement_within_a_view_sees_that_view(store: Store, job: str) -> None:
    with store.database.reading() as session:
        session.connection()
        assert store.job(job).name == store.contact(job).name


def test_a_connection_lost_within_a_view_is_an_error_of_sqlalchemy_too(postgresql_url: str) -> None:
    store = Store(postgresql_url)

    def look() -> None:
        with store.database.reading() as session:
            session.connection()
            end_connections(postgresql_url)
            store.contact("job")

    with pytest.raises(DBAPIError):
        look()
    store.close()

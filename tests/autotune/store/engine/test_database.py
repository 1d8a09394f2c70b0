"""Databases that serve, that do not, and that give no answer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from bagua_autotune.store import Store
from bagua_autotune.store.engine.postgresql import RETRY_SECONDS, Circuit
from bagua_autotune.store.errors import NoAnswer, StoreError
from tests.autotune.store.samples import (
    FIRST,
)
from tests.autotune.support import make_spec


def test_reading_makes_no_database(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'typo.db'}"
    with pytest.raises(StoreError, match=r"no database .*typo\.db"):
        Store(url, as_found=True)
    assert list(tmp_path.iterdir()) == []
    Store(url).close()
    Store(url, as_found=True).close()


def test_two_stores_share_a_file_and_it_outlives_them(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'autotune.db'}"
    first, second = Store(url), Store(url)
    first.create_job("job", make_spec(), at=1.0)
    assert second.advance("job", FIRST)
    assert not first.advance("job", FIRST)
    first.close()
    second.close()
    assert len(Store(url).trials("job")) == 1


@pytest.mark.parametrize("url", ["mongodb://x/y", "sqlite:////proc/no/such.db"])
def test_a_database_that_cannot_be_used_is_named(url: str) -> None:
    with pytest.raises(StoreError) as error:
        Store(url)
    assert url in str(error.value)


def test_something_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database\n" * 100)
    with pytest.raises(StoreError, match=r"notes\.txt"):
        Store(f"sqlite:///{path}")
    assert path.read_text().startswith("not a database")


def test_a_view_stays_as_it_was_when_it_was_opened(store: Store, job: str) -> None:
    if not store.database.url.database:
        pytest.skip("a database in memory has one connection: writers wait for readers")
    with store.database.reading(), ThreadPoolExecutor(1) as writer:
        before = store.job(job)
        writer.submit(store.touch, job, 99.0).result()
        assert store.job(job) == before
    assert store.job(job).last_contact_at == 99.0


def test_what_is_read_together_is_one_view(store: Store, job: str) -> None:
    with store.database.reading() as outer:
        with store.database.reading() as inner:
            assert inner is outer
        assert store.job(job).id == job
    with store.database.reading() as later:
        assert later is not outer


@pytest.mark.parametrize("empty_url", ["postgresql"], indirect=True)
def test_connections_that_were_lost_are_not_used_again(empty_url: str) -> None:
    store = Store(empty_url)
    other = create_engine(empty_url)
    with other.connect() as connection:
        connection.exec_driver_sql(
            "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid != pg_backend_pid()"
        )
    other.dispose()
    store.check()
    store.close()


def test_after_a_failure_one_at_a_time_tries_until_there_is_an_answer() -> None:
    now = [0.0]
    circuit = Circuit(lambda: now[0])
    circuit.enter()
    circuit.enter()
    circuit.failed()
    with pytest.raises(NoAnswer):
        circuit.enter()
    now[0] = RETRY_SECONDS
    circuit.enter()
    with pytest.raises(NoAnswer):
        circuit.enter()
    circuit.answered()
    circuit.enter()
    circuit.enter()

"""Databases that serve, that do not, that give no answer, and that cannot be written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import create_engine, func, select, text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from bagua_autotune.app import create_app
from bagua_autotune.model.job import Event, Observation
from bagua_autotune.settings import Settings
from bagua_autotune.store import TRY_SECONDS, Store, Writable
from bagua_autotune.store.engine import database
from bagua_autotune.store.engine.postgresql import RETRY_SECONDS, Circuit
from bagua_autotune.store.engine.tables import JobRow
from bagua_autotune.store.errors import DAMAGED, DISK_FULL, READ_ONLY, NoAnswer, StoreError, trouble
from tests.autotune.store.disks import fill, mounted
from tests.autotune.store.samples import (
    FIRST,
)
from tests.autotune.support import make_spec, registration

END_CONNECTIONS = text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
)


def test_reading_makes_no_database(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'typo.db'}"
    with pytest.raises(StoreError, match=r"no database .*typo\.db"):
        Store(url, as_found=True)
    assert list(tmp_path.iterdir()) == []
    Store(url).close()
    Store(url, as_found=True).close()


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


def end_connections(url: str) -> None:
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(END_CONNECTIONS)
    engine.dispose()


def test_whoever_meets_a_lost_connection_is_served_by_a_new_one_and_nothing_is_said(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # On busy cores that may take as long as where a server has gone.
    monkeypatch.setattr(database, "QUICK_SECONDS", 600.0)
    store = Store(postgresql_url)
    with store.database.reading(), store.database.writing():
        pass  # two lie in the pool then
    store.jobs.create("lost", make_spec(), at=1.0)
    store.trials.advance("lost", FIRST)
    for step in range(3):
        end_connections(postgresql_url)
        store.observations.add("lost", 0, [Observation(step, (0.1,) * 4)], at=2.0)
        end_connections(postgresql_url)
        assert store.jobs.contact("lost").last_contact_at == 2.0
        end_connections(postgresql_url)
        assert store.jobs.get("lost").id == "lost"
        end_connections(postgresql_url)
        with store.database.reading():
            ((count,),) = store.database.read(select(func.count()).where(JobRow.id == "lost"))
            assert count == 1
        end_connections(postgresql_url)
        store.events.add("lost", Event("note", step=step, at=3.0))
    assert [step.step for _, step in store.observations.of("lost")] == [0, 1, 2]
    assert [event.step for event in store.events.of("lost")] == [0, 1, 2]
    store.close()
    assert caplog.messages == []


def test_whoever_may_try_after_a_failure_is_served_by_a_new_connection(postgresql_url: str) -> None:
    store = Store(postgresql_url)
    now = [0.0]
    store.database._circuit = Circuit(lambda: now[0])
    store.jobs.create("tried", make_spec(), at=1.0)
    store.jobs.contact("tried")
    end_connections(postgresql_url)
    store.database._circuit.failed()
    now[0] = RETRY_SECONDS
    assert store.jobs.contact("tried").id == "tried"
    assert store.jobs.get("tried").id == "tried", "all others may ask, too"
    store.close()


def test_a_connection_lost_within_a_view_is_an_error_of_sqlalchemy_too(postgresql_url: str) -> None:
    store = Store(postgresql_url)

    def look() -> None:
        with store.database.reading():
            end_connections(postgresql_url)
            store.jobs.contact("job")

    with pytest.raises(DBAPIError):
        look()
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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", 4) as point:
        yield point


def test_a_service_on_a_full_disk_is_not_ready_until_there_is_room(small_disk: Path) -> None:
    with closing(Store(f"sqlite:///{small_disk / 'a.db'}")) as store:
        client = create_app(Settings(), store).test_client()
        assert client.put("/api/v2/jobs/job", json=registration()).status_code == 201
        assert client.get("/readyz").status_code == 200
        fill(small_disk / "other")
        refused = client.put("/api/v2/jobs/next", json=registration())
        assert (refused.status_code, refused.get_json(force=True)["detail"]) == (503, DISK_FULL)
        told = client.get("/readyz")
        assert (told.status_code, told.get_json(force=True)["detail"]) == (503, DISK_FULL)
        assert client.get("/api/v2/jobs/job").status_code == 200
        (small_disk / "other").unlink()
        assert client.get("/readyz").status_code == 200
        assert client.put("/api/v2/jobs/next", json=registration()).status_code == 201


def test_a_disk_on_which_little_is_left_counts_as_full(small_disk: Path) -> None:
    """A small write still fits into the log that SQLite has."""
    with closing(Store(f"sqlite:///{small_disk / 'a.db'}")) as store:
        fill(small_disk / "other")
        with pytest.raises(SQLAlchemyError) as told:
            store.check()
    assert trouble(told.value) == DISK_FULL


@contextmanager
def unwritable(store: Store) -> Iterator[None]:
    """What the trial writes has another name in this block, so writing fails."""

    def rename(before: str, after: str) -> None:
        store.database.write(text(f"ALTER TABLE schema_version RENAME COLUMN {before} TO {after}"))

    rename("version", "other")
    try:
        yield
    finally:
        rename("other", "version")


def test_it_is_tried_from_time_to_time_and_after_a_failure(store: Store) -> None:
    now = 0.0
    writable = Writable(store.database, lambda: now)
    writable.check()
    with unwritable(store):
        now = TRY_SECONDS - 1
        writable.check()  # it was shown a moment ago
        now = TRY_SECONDS
        for _ in range(2):
            with pytest.raises(SQLAlchemyError):
                writable.check()
    writable.check()
    with unwritable(store):
        writable.check()
        with pytest.raises(SQLAlchemyError):
            store.database.write(text("UPDATE nothing SET nothing = 1"))
        with pytest.raises(SQLAlchemyError):
            writable.check()


def test_a_server_that_only_reads_says_so(postgresql_url: str) -> None:
    def write() -> None:
        with store.database.writing() as run:
            run(text("SET TRANSACTION READ ONLY"))
            run(text("UPDATE schema_version SET version = version"))

    with closing(Store(postgresql_url)) as store:
        with pytest.raises(SQLAlchemyError) as told:
            write()
        assert trouble(told.value) == READ_ONLY


def test_a_damaged_file_is_called_so(tmp_path: Path) -> None:
    file = tmp_path / "a.db"
    with closing(Store(f"sqlite:///{file}")) as store:
        store.check()
        store.database.close()  # its log becomes part of the file
        with file.open("r+b") as opened:
            opened.write(b"no database")
        with pytest.raises(SQLAlchemyError) as told:
            store.check()
        assert trouble(told.value) == DAMAGED

"""A database that cannot be written: found out from time to time, and said."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from bagua_autotune.app import create_app
from bagua_autotune.settings import Settings
from bagua_autotune.store import TRY_SECONDS, Store, Writable
from bagua_autotune.store.errors import DAMAGED, DISK_FULL, READ_ONLY, trouble
from tests.autotune.store.disks import fill, mounted
from tests.autotune.support import registration


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

"""A SQLite file that is deleted or replaced while a store has it open."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import text

from bagua_autotune.store import Store
from bagua_autotune.store.errors import FileLost
from tests.autotune.support import make_spec, stored_jobs


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.db"


@pytest.fixture
def store(path: Path) -> Store:
    opened = Store(f"sqlite:///{path}")
    opened.jobs.create("first", make_spec(), at=1.0)
    return opened


def test_nobody_else_can_read_what_is_stored(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        opened = Store(f"sqlite:///{tmp_path / 'new' / 'a.db'}")
        opened.jobs.create("first", make_spec(), at=1.0)
        modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()}
        opened.close()
    finally:
        os.umask(umask)
    assert modes == dict.fromkeys(("a.db", "a.db-wal", "a.db-shm", "a.db-reserve"), 0o600)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def jobs_of(path: Path) -> set[str]:
    opened = Store(f"sqlite:///{path}")
    found = {job.id for job in stored_jobs(opened)}
    opened.close()
    return found


def is_whole(path: Path) -> bool:
    with closing(sqlite3.connect(path)) as connection:
        return bool(connection.execute("PRAGMA integrity_check").fetchone() == ("ok",))


def test_nothing_is_stored_in_a_deleted_file_until_it_is_back(store: Store, path: Path) -> None:
    path.rename(path.with_name("moved.db"))
    with pytest.raises(FileLost, match=r"a\.db was deleted or moved while it was used"):
        store.jobs.create("lost", make_spec(), at=2.0)
    with pytest.raises(FileLost, match="deleted or moved"):
        store.check()
    with pytest.raises(FileLost, match="deleted or moved"):
        stored_jobs(store)
    assert not path.exists()
    path.with_name("moved.db").rename(path)
    store.check()
    assert store.jobs.create("second", make_spec(), at=2.0)
    store.close()
    assert jobs_of(path) == {"first", "second"}


def test_a_further_connection_makes_no_new_file(store: Store, path: Path) -> None:
    def create_in_a_view() -> None:
        with store.database.reading():
            path.unlink()
            with pytest.raises(FileLost, match="deleted or moved"):
                store.jobs.create("lost", make_spec(), at=2.0)

    with pytest.raises(FileLost, match="deleted or moved"):  # as the view is over
        create_in_a_view()
    assert not path.exists()


def test_a_transaction_during_which_the_file_goes_is_not_taken(store: Store, path: Path) -> None:
    def write() -> None:
        with store.database.writing() as run:
            run(text("UPDATE jobs SET name = 'other'"))
            path.unlink()

    with pytest.raises(FileLost):
        write()


def test_one_that_took_its_place_is_not_spoilt_by_the_log_that_was_left(
    store: Store, path: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.db"
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    for number in range(20):
        store.jobs.create(f"later{number}", make_spec(), at=2.0)
    path.rename(tmp_path / "moved.db")
    shutil.copy(copy, path)  # its log is still in its place
    with pytest.raises(FileLost, match=r"a\.db was replaced while it was used: restart"):
        store.check()
    store.close()
    assert jobs_of(path) == {"first"}
    assert is_whole(path)
    with closing(sqlite3.connect(tmp_path / "moved.db")) as moved:
        assert moved.execute("SELECT COUNT(*) FROM jobs").fetchone() == (21,)


@pytest.mark.parametrize("log", ["-wal", "-shm"])
def test_a_store_whose_log_is_deleted_still_stores_what_it_knows(
    store: Store, path: Path, log: str
) -> None:
    Path(f"{path}{log}").unlink()
    with pytest.raises(FileLost, match=rf"a\.db{log} of the database was deleted or replaced"):
        store.jobs.create("lost", make_spec(), at=2.0)
    store.close()
    assert jobs_of(path) == {"first"}
    assert is_whole(path)


def test_a_file_that_is_replaced_while_it_is_opened_is_refused(
    store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = sqlite3.connect

    def replace(*given: object, **options: object) -> sqlite3.Connection:
        opened: sqlite3.Connection = connect(*given, **options)  # type: ignore[call-overload]
        path.rename(path.with_name("moved.db"))
        path.touch()
        return opened

    store.close()  # its connections; the next transaction opens one
    monkeypatch.setattr("sqlite3.dbapi2.connect", replace)
    with pytest.raises(FileLost, match="replaced"):
        store.check()

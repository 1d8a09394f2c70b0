"""A copy of the database while it is written to, and whether it is well."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bagua_autotune.cli import main
from bagua_autotune.store import Store, location
from bagua_autotune.store.tables import SCHEMA_VERSION
from tests.autotune.support import make_spec


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A database with two jobs."""
    store = Store(f"sqlite:///{tmp_path / 'a.db'}")
    for number in range(2):
        store.create_job(f"job{number}", make_spec(), at=1e9 + number)
    store.close()
    return tmp_path / "a.db"


def execute(file: Path, statement: str) -> None:
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute(statement)


def test_a_copy_is_made_while_the_database_is_written_to(file: Path, tmp_path: Path) -> None:
    store, stopping, begun = Store(f"sqlite:///{file}"), threading.Event(), threading.Event()

    def write() -> None:
        number = 0
        while not stopping.is_set():
            store.create_job(f"written{number}", make_spec(), at=2e9)
            number += 1
            begun.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert begun.wait(60)
        copied = run("backup", str(tmp_path / "b.db"), "--database", f"sqlite:///{file}")
    finally:
        stopping.set()
        writer.join()
    assert copied.exit_code == 0, copied.output
    assert copied.output.endswith("b.db\n")
    assert "use it with --database sqlite:" in copied.output
    copy = Store(f"sqlite:///{tmp_path / 'b.db'}", as_found=True)
    assert {"job0", "job1", "written0"} <= {job.id for job in copy.jobs(limit=10_000)}
    copy.close()
    store.close()
    assert run("doctor", "--database", f"sqlite:///{tmp_path / 'b.db'}").exit_code == 0
    assert not list(tmp_path.glob("*.part"))


def test_one_of_an_older_release_is_copied_too(file: Path, tmp_path: Path) -> None:
    execute(file, "UPDATE schema_version SET version = 2")
    assert run("backup", str(tmp_path / "b.db"), "--database", f"sqlite:///{file}").exit_code == 0


@pytest.mark.parametrize(
    ("database", "words"),
    [
        ("postgresql+pg8000://ada:secret@host/name", "pg_dump"),
        ("sqlite:////nowhere/a.db", "there is no database"),
        ("sqlite:///{file}", "exists already"),
    ],
)
def test_what_cannot_be_copied_is_said(file: Path, database: str, words: str) -> None:
    before = file.read_bytes()
    told = run("backup", str(file), "--database", database.format(file=file))
    assert told.exit_code == 1
    assert words in told.output
    assert "secret" not in told.output
    assert file.read_bytes() == before


def test_a_damaged_one_is_not_copied(file: Path, tmp_path: Path) -> None:
    damage(file)
    told = run("backup", str(tmp_path / "b.db"), "--database", f"sqlite:///{file}")
    assert told.exit_code == 1
    assert not (tmp_path / "b.db").exists()


def damage(file: Path) -> None:
    """What a page of the jobs' index holds is gone."""
    with closing(sqlite3.connect(file)) as connection:
        query = "SELECT rootpage FROM sqlite_master WHERE name = 'jobs_by_creation'"
        (page,) = connection.execute(query).fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    with file.open("r+b") as opened:
        opened.seek((page - 1) * size)
        opened.write(b"\x0a" + bytes(size - 1))  # a leaf of an index, without a cell


def test_doctor_says_what_is_well(file: Path) -> None:
    told = run("doctor", "--database", f"sqlite:///{file}")
    assert told.exit_code == 0, told.output
    assert "FAULT" not in told.output
    assert f"schema version {SCHEMA_VERSION}" in told.output
    assert "integrity check finds no fault" in told.output
    assert "2 of 2 jobs can be read, from 2001-09-0" in told.output


def test_doctor_finds_faults(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    execute(file, "UPDATE jobs SET spec = '{}' WHERE id = 'job1'")
    execute(file, "INSERT INTO trials (job_id, \"index\", purpose, state, configuration, steps, "
                  "outliers) VALUES ('gone', 0, 'search', 'running', '{}', 0, 0)")  # fmt: skip
    damage(file)
    told = run("doctor", "--database", f"sqlite:///{file}")
    assert told.exit_code == 1
    assert "FAULT: SQLite's integrity check" in told.output
    assert "FAULT: 1 rows belong to" in told.output
    assert "faults found" in told.output


def test_doctor_names_a_job_that_cannot_be_read(file: Path) -> None:
    execute(file, "UPDATE jobs SET spec = '{}' WHERE id = 'job1'")
    told = run("doctor", "--database", f"sqlite:///{file}")
    assert told.exit_code == 1
    assert "FAULT: job job1 cannot be read" in told.output
    assert "1 of 2 jobs can be read" in told.output
    assert "1 fault found" in told.output


def test_doctor_knows_network_file_systems(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(location, "MOUNTINFO", tmp_path / "mountinfo")
    (tmp_path / "mountinfo").write_text("1 0 0:1 / / rw - nfs4 a rw\n")
    told = run("doctor", "--database", f"sqlite:///{file}")
    assert told.exit_code == 0
    assert "network file system (nfs4), in journal mode delete" in told.output


def test_doctor_of_what_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "a.db").write_bytes(b"no database" * 1000)
    for url in (f"sqlite:///{tmp_path / 'a.db'}", f"sqlite:///{tmp_path / 'gone.db'}"):
        told = run("doctor", "--database", url)
        assert told.exit_code == 1
        assert told.output.startswith("Error: ")

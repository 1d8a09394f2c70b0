"""Copies of the database, made while it is written to and put back, and whether it is well."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from bagua_autotune.store import Store
from bagua_autotune.store.engine import location
from bagua_autotune.store.engine.tables import SCHEMA_VERSION
from bagua_autotune.store.maintenance import checkup
from tests.autotune.cli.conftest import run
from tests.autotune.support import make_spec, stored_jobs


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A database with two jobs."""
    store = Store(f"sqlite:///{tmp_path / 'a.db'}")
    for number in range(2):
        store.jobs.create(f"job{number}", make_spec(), at=1e9 + number)
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
            store.jobs.create(f"written{number}", make_spec(), at=2e9)
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
    assert {"job0", "job1", "written0"} <= {job.id for job in stored_jobs(copy)}
    copy.close()
    store.close()
    assert run("doctor", "--database", f"sqlite:///{tmp_path / 'b.db'}").exit_code == 0
    assert not list(tmp_path.glob("*.part"))


def test_one_of_an_older_release_is_copied_too(file: Path, tmp_path: Path) -> None:
    execute(file, f"UPDATE schema_version SET version = {SCHEMA_VERSION - 1}")
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


@pytest.fixture
def copy(file: Path, tmp_path: Path) -> Path:
    """A copy of the database, which has a third and large job since, mostly in a log left by a
    process that was killed."""
    assert run("backup", str(tmp_path / "b.db"), "--database", f"sqlite:///{file}").exit_code == 0
    killed = tmp_path / "killed"
    killed.mkdir()
    store = Store(f"sqlite:///{file}")
    store.jobs.create("later", make_spec(), at=2e9)
    for ending in ("", "-wal", "-shm"):
        shutil.copy(f"{file}{ending}", killed)
    store.close()
    for ending in ("", "-wal", "-shm"):
        (killed / f"a.db{ending}").rename(f"{file}{ending}")
    assert Path(f"{file}-wal").stat().st_size > 0
    return tmp_path / "b.db"


def jobs_of(file: Path) -> set[str]:
    store = Store(f"sqlite:///{file}")
    found = {job.id for job in stored_jobs(store)}
    store.close()
    return found


def test_a_copy_is_restored_over_what_a_killed_process_left(file: Path, copy: Path) -> None:
    told = run("restore", str(copy), "--database", f"sqlite:///{file}")
    assert told.exit_code == 0, told.output
    assert "2 jobs, the last report of 2001-09-0" in told.output
    names = {path.name for path in file.parent.iterdir()}
    assert names == {"a.db", "a.db-reserve", "b.db", "killed"}
    assert file.stat().st_mode & 0o777 == 0o600
    assert jobs_of(file) == {"job0", "job1"}
    assert run("doctor", "--database", f"sqlite:///{file}").exit_code == 0


@pytest.mark.parametrize("state", ["damaged", "no database", "gone"])
def test_it_is_restored_whatever_became_of_the_database(file: Path, copy: Path, state: str) -> None:
    if state == "damaged":
        file.write_bytes(file.read_bytes()[:5000])
    elif state == "no database":
        file.write_bytes(b"no database" * 1000)
    elif state == "gone":
        file.unlink()  # its log stays
    told = run("restore", str(copy), "--database", f"sqlite:///{file}")
    assert told.exit_code == 0, told.output
    assert jobs_of(file) == {"job0", "job1"}


USER = """
import sqlite3, sys
from tests.autotune.cli.conftest import run
opened = sqlite3.connect(sys.argv[1])
opened.execute("SELECT * FROM jobs").fetchall()
print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("state", ["well", "damaged"])
def test_a_database_that_is_used_is_not_replaced(file: Path, copy: Path, state: str) -> None:
    command = [sys.executable, "-c", USER, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as user:
        assert user.stdout
        assert user.stdout.readline() == b"open\n"
        if state == "damaged":
            with file.open("r+b") as opened:
                opened.write(b"no database")
        before = file.read_bytes(), Path(f"{file}-wal").read_bytes()
        told = run("restore", str(copy), "--database", f"sqlite:///{file}")
        assert told.exit_code == 1
        assert "is in use, and nothing is changed; stop the service" in told.output
        assert before == (file.read_bytes(), Path(f"{file}-wal").read_bytes())
        user.communicate()
    assert not list(file.parent.glob("*.part"))
    assert run("restore", str(copy), "--database", f"sqlite:///{file}").exit_code == 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("missing", "there is no file"),
        ("the database itself", "is the database itself"),
        ("no database", "cannot be restored"),
        ("damaged", "cannot be restored"),
        ("of another program", "is no database of this service"),
        ("of a newer release", "has the newer schema version 1000"),
        ("empty", "is no database of this service"),
    ],
)
def test_what_cannot_be_restored_changes_nothing(
    file: Path, copy: Path, wrong: str, words: str
) -> None:
    if wrong == "missing":
        copy.unlink()
    elif wrong == "the database itself":
        copy = file
    elif wrong == "no database":
        copy.write_bytes(b"no database" * 1000)
    elif wrong == "damaged":
        damage(copy)
    elif wrong == "of another program":
        copy.unlink()
        execute(copy, "CREATE TABLE songs (name TEXT)")
    elif wrong == "of a newer release":
        execute(copy, "UPDATE schema_version SET version = 1000")
    elif wrong == "empty":
        copy.write_bytes(b"")
    before = file.read_bytes()
    told = run("restore", str(copy), "--database", f"sqlite:///{file}")
    assert told.exit_code == 1
    assert words in told.output
    assert file.read_bytes() == before
    assert not list(file.parent.glob("*.part"))
    assert jobs_of(file) == {"job0", "job1", "later"}


def test_one_of_a_server_is_restored_by_its_own_tools(copy: Path) -> None:
    told = run("restore", str(copy), "--database", "postgresql+pg8000://ada:secret@host/name")
    assert told.exit_code == 1
    assert "pg_restore" in told.output
    assert "secret" not in told.output


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files to others")
def test_what_root_restores_belongs_to_the_service(file: Path, copy: Path) -> None:
    os.chown(file, 12345, 12346)
    assert run("restore", str(copy), "--database", f"sqlite:///{file}").exit_code == 0
    assert (file.stat().st_uid, file.stat().st_gid) == (12345, 12346)


def test_doctor_says_what_is_well(file: Path) -> None:
    told = run("doctor", "--database", f"sqlite:///{file}")
    assert told.exit_code == 0, told.output
    assert "FAULT" not in told.output
    assert f"schema version {SCHEMA_VERSION}" in told.output
    assert "integrity check finds no fault" in told.output
    assert "2 of 2 jobs can be read, from 2001-09-0" in told.output


def test_doctor_names_a_job_that_cannot_be_read(file: Path) -> None:
    execute(file, "UPDATE jobs SET spec = '{}' WHERE id = 'job1'")
    told = run("doctor", "--database", f"sqlite:///{file}")
    assert told.exit_code == 1
    assert "FAULT: job job1 cannot be read" in told.output
    assert "1 of 2 jobs can be read" in told.output
    assert "1 fault found" in told.output


def test_doctor_finds_faults_and_what_it_says_to_do_mends_them(file: Path) -> None:
    execute(file, "UPDATE jobs SET spec = '{}' WHERE id = 'job1'")
    execute(file, "INSERT INTO trials (job_id, \"index\", purpose, state, configuration, steps, "
                  "outliers) VALUES ('gone', 0, 'search', 'running', '{}', 0, 0)")  # fmt: skip
    damage(file)
    database = ["--database", f"sqlite:///{file}"]
    told = run("doctor", *database)
    assert told.exit_code == 1
    assert "FAULT: SQLite's integrity check" in told.output
    assert "FAULT: 1 rows belong to" in told.output
    assert "faults found" in told.output
    for _ in range(3):
        told = run("doctor", *database)
        faults = [line for line in told.stdout.splitlines() if line.startswith("FAULT")]
        assert faults
        for fault in faults:
            to_do = fault.partition(". What to do: ")[2]
            if "REINDEX" in to_do:
                execute(file, "REINDEX")
            elif "DELETE" in to_do:
                for statement in to_do.split('"')[1].split("; "):
                    execute(file, statement)
            else:
                command = to_do.split("`")[1].split()
                assert command[0] == "bagua-autotune"
                run(*command[1:], *database)
        told = run("doctor", *database)
        if told.exit_code == 0:
            break
    assert told.exit_code == 0, told.output
    assert "1 of 1 jobs can be read" in told.output


@pytest.mark.parametrize("free", [0, checkup.LEAST_FREE_BYTES - 1])
def test_doctor_says_how_to_make_room(
    file: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    usage = shutil.disk_usage(file)._replace(free=free)
    monkeypatch.setattr(checkup.shutil, "disk_usage", lambda _: usage)
    told = run("doctor", "--database", f"sqlite:///{file}")
    assert told.exit_code == 1
    (fault,) = (line for line in told.stdout.splitlines() if line.startswith("FAULT"))
    assert "bagua-autotune prune" in fault.partition(" are free on its disk. What to do: ")[2]


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
        assert any(what in told.output for what in ("restore FILE`", "--database names another"))

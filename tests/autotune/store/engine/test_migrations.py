"""The schema of an empty database, and its successor: a made-up one with one more column."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import MetaData, create_engine, inspect

from bagua_autotune.store import Store
from bagua_autotune.store.engine import migrations
from bagua_autotune.store.engine.tables import SCHEMA_VERSION
from bagua_autotune.store.errors import OtherSchema, StoreError
from tests.autotune.support import make_spec

NEXT_VERSION = SCHEMA_VERSION + 1
REVISION = f"""
from alembic import op
from sqlalchemy import Column, Text

revision, down_revision = "{NEXT_VERSION}", None


def upgrade() -> None:
    op.add_column("jobs", Column("colour", Text, nullable=False, server_default="grün"))
"""


def execute(url: str, *statements: str) -> None:
    engine = create_engine(url)
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    engine.dispose()


def make_old(empty_url: str) -> str:
    """A database of today's schema, with a job."""
    store = Store(empty_url)
    assert store.jobs.create("before", make_spec(), at=1e3)
    store.close()
    return empty_url


@pytest.fixture
def install_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """Makes the code that of the release after this one; the file that leads there."""

    def install() -> Path:
        file = tmp_path / "revisions" / f"{NEXT_VERSION}.py"
        file.parent.mkdir()
        file.write_text(REVISION)
        monkeypatch.setattr(migrations, "REVISIONS", file.parent)
        monkeypatch.setattr(migrations, "SCHEMA_VERSION", NEXT_VERSION)
        return file

    return install


def schema(url: str) -> dict[str, Any]:
    """Columns, indices and constraints of every table."""
    engine = create_engine(url)
    found = inspect(engine)
    tables = {
        table: {
            "columns": {c["name"]: (str(c["type"]), c["nullable"], c["default"])
                        for c in found.get_columns(table)},
            "indices": {i["name"]: (i["column_names"], i["unique"])
                        for i in found.get_indexes(table)},
            "unique": [u["column_names"] for u in found.get_unique_constraints(table)],
            "keys": [(k["constrained_columns"], k["referred_table"], k["options"])
                     for k in found.get_foreign_keys(table)],
        }
        for table in found.get_table_names()
    }  # fmt: skip
    engine.dispose()
    return tables


def contents(url: str) -> dict[str, list[Any]]:
    engine = create_engine(url)
    metadata = MetaData()
    metadata.reflect(engine)
    with engine.connect() as connection:
        rows = {
            name: [tuple(row) for row in connection.execute(table.select())]
            for name, table in metadata.tables.items()
        }
    engine.dispose()
    return rows


def test_every_version_has_what_leads_to_it() -> None:
    found = [int(each.revision) for each in migrations.revisions()]
    assert found == list(range(2, SCHEMA_VERSION + 1))


def test_the_next_release_adds_a_column_and_nothing_is_lost(
    empty_url: str, install_next: Callable[[], Path]
) -> None:
    make_old(empty_url)
    before, rows = schema(empty_url), contents(empty_url)
    install_next()
    store = Store(empty_url)
    assert store.jobs.get("before").created_at == 1e3
    # As replicas of this release, which do not know the column, go on doing.
    assert store.jobs.create("after", make_spec(), at=2e3)
    store.close()
    execute(empty_url, "DELETE FROM jobs WHERE id = 'after'")
    after, found = schema(empty_url), contents(empty_url)
    name, is_null, _ = after["jobs"]["columns"].pop("colour")
    assert (name, is_null, after) == ("TEXT", False, before)
    assert found.pop("schema_version") == [(NEXT_VERSION,)]
    del rows["schema_version"]
    assert found.pop("jobs") == [(*row, "grün") for row in rows.pop("jobs")]
    assert found == rows


def test_what_fails_leaves_it_as_it_was(empty_url: str, install_next: Callable[[], Path]) -> None:
    make_old(empty_url)
    file = install_next()
    file.write_text(f"{REVISION}    op.drop_column('jobs', 'nothing')\n")
    before = schema(empty_url), contents(empty_url)
    with pytest.raises(StoreError, match=rf"stays at schema version {SCHEMA_VERSION}.*nothing"):
        Store(empty_url)
    assert (schema(empty_url), contents(empty_url)) == before
    file.write_text(REVISION)
    Store(empty_url).close()


def test_who_only_reads_does_not_bring_it_up(
    empty_url: str, install_next: Callable[[], Path]
) -> None:
    make_old(empty_url)
    before = schema(empty_url), contents(empty_url)
    install_next()
    with pytest.raises(OtherSchema, match=r"is of an older release.*start this release's service"):
        Store(empty_url, as_found=True)
    assert (schema(empty_url), contents(empty_url)) == before
    Store(empty_url).close()
    reader = Store(empty_url, as_found=True)
    assert reader.jobs.get("before").name
    reader.close()


@pytest.mark.parametrize("empty_url", ["postgresql"], indirect=True)
def test_it_gives_way_to_who_uses_the_tables_and_keeps_nobody_waiting(
    empty_url: str,
    install_next: Callable[[], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As to pg_dump, which reads all tables in one transaction."""
    monkeypatch.setattr(migrations, "PAUSE_SECONDS", 0.05)
    caplog.set_level(logging.INFO)
    make_old(empty_url)
    install_next()
    engine = create_engine(empty_url)
    with ThreadPoolExecutor(1) as pool, engine.connect() as copying:
        copying.exec_driver_sql("SELECT count(*) FROM jobs")
        opening = pool.submit(Store, empty_url)
        while "tables are in use" not in caplog.text:
            time.sleep(0.01)
        longest = 0.0
        for _ in range(20):
            began = time.monotonic()
            with engine.connect() as connection:
                connection.exec_driver_sql("SELECT count(*) FROM jobs")
            longest = max(longest, time.monotonic() - began)
        assert longest < 2 * migrations.LOCK_SECONDS + 1
        assert not opening.done()
        copying.rollback()
        opening.result().close()
    engine.dispose()
    assert contents(empty_url)["schema_version"] == [(NEXT_VERSION,)]


def test_who_only_reads_does_not_make_one(empty_url: str) -> None:
    execute(empty_url)  # SQLite makes an empty file
    with pytest.raises(StoreError, match="no service has used it"):
        Store(empty_url, as_found=True)
    assert schema(empty_url) == {}


@pytest.mark.parametrize(("jobs", "version"), [(0, SCHEMA_VERSION), (1, NEXT_VERSION)])
def test_replicas_that_start_at_once_find_one_database(
    empty_url: str, jobs: int, version: int, install_next: Callable[[], Path]
) -> None:
    if version == NEXT_VERSION:
        make_old(empty_url)
        install_next()
    barrier = threading.Barrier(4)
    failures: list[BaseException] = []

    def start(number: int) -> None:
        barrier.wait()
        try:
            store = Store(empty_url)
            store.jobs.create(f"of-{number}", make_spec(), at=2e3)
            store.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=start, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    found = contents(empty_url)
    assert [tuple(row) for row in found["schema_version"]] == [(version,)]
    assert len(found["jobs"]) == jobs + 4


@pytest.mark.parametrize(("version", "age"), [(99, "newer"), (0, "unknown")])
def test_a_schema_that_this_release_does_not_know_is_left_alone(
    empty_url: str, version: int, age: str
) -> None:
    make_old(empty_url)
    execute(empty_url, f"UPDATE schema_version SET version = {version}")
    before = schema(empty_url), contents(empty_url)
    for as_found in (False, True):
        with pytest.raises(OtherSchema, match=f"{age} schema version {version}"):
            Store(empty_url, as_found=as_found)
    assert (schema(empty_url), contents(empty_url)) == before

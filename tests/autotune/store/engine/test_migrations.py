"""Databases that an older release made; ``version_2`` is what one of schema version 2 wrote.

``version_3`` has the same jobs; ``done`` is tuned again there, and ``like`` inherits from it.
Those after it have those of ``version_3``, as they were brought up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import MetaData, create_engine, inspect, make_url

from bagua_autotune.model.job import Observation, Trial
from bagua_autotune.model.knobs import Configuration
from bagua_autotune.store import Store
from bagua_autotune.store.engine import migrations
from bagua_autotune.store.engine.tables import SCHEMA_VERSION
from bagua_autotune.store.errors import OtherSchema, StoreError
from bagua_autotune.store.trials import Step
from bagua_autotune.views import Overviews
from tests.autotune.support import make_spec

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


def execute(url: str, *statements: str) -> None:
    engine = create_engine(url)
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    engine.dispose()


def make_old(empty_url: str, version: int) -> str:
    """A database of an older schema version, with a job that is tuned and one half way."""
    dialect = "sqlite" if empty_url.startswith("sqlite") else "postgresql"
    folder = HERE / f"version_{version}"
    scripts = [(folder / name).read_text() for name in (f"{dialect}.sql", "rows.sql")]
    execute(empty_url, *(part for script in scripts for part in script.split(";\n") if part))
    return empty_url


@pytest.fixture
def old_url(empty_url: str) -> str:
    return make_old(empty_url, 2)


@pytest.fixture
def recent_url(empty_url: str) -> str:
    return make_old(empty_url, 7)


@contextmanager
def own_database(postgresql_url: str) -> Iterator[str]:
    """An empty one of that server."""
    engine = create_engine(postgresql_url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql("CREATE DATABASE upgraded")
        yield make_url(postgresql_url).set(database="upgraded").render_as_string(False)
        connection.exec_driver_sql("DROP DATABASE upgraded WITH (FORCE)")
    engine.dispose()


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


def test_what_an_older_release_stored_is_all_there(old_url: str) -> None:
    store = Store(old_url)
    done, half = store.job("done"), store.job("half")
    assert (done.phase, done.round, done.inherited) == ("finished", 0, None)
    assert done.result is not None
    assert (done.result.kept, done.result.steps, done.result.payback_steps) == (
        "baseline",
        30,
        None,
    )
    assert [(trial.index, trial.round) for trial in store.trials("done")] == [
        (0, 0),
        (1, 0),
        (2, 0),
    ]
    assert store.tensors("half")[0].name == "head.weight"
    assert (half.phase, half.limits.max_rounds) == ("tuning", 10)
    first = Observation(31, (0.2255, 0.2269, 0.2273, 0.2262))
    assert store.observations("half")[0] == (0, first)
    assert [event.message for event in store.events("done")] == ["grüße"]
    family = store.family_of("DDP_140")
    assert family is not None
    assert family.key == "family"
    store.close()


def test_what_the_last_release_stored_is_all_there(recent_url: str) -> None:
    store = Store(recent_url)
    done, like = store.job("done"), store.job("like")
    assert (done.phase, done.round, done.revision) == ("tuning", 1, 0)
    assert like.inherited is not None
    assert (like.inherited.source, like.revision) == ("done", 0)
    first, second = store.observations("done", 3)
    assert first == (3, Observation(140, (0.3, 0.31, 0.29, 0.3)))
    assert [profile.step_seconds for _, profile in store.profiles("done")] == [0.31]
    assert store.step_times("done")[-2:] == [(3, 140, 0.31), (3, 141, 0.31)]
    told = Observation(142, (0.3,) * 4, (0.1, 0.2, 0.1, 0.1), 120.0)
    assert store.add_observations("done", 3, [told], 2e3).new == [told]
    assert store.observations("done", 3) == [first, second, (3, told)]
    assert store.job("done").revision == 1
    switched = store.events("done")[-1]
    assert store.add_event("done", replace(switched, at=2e3)) is None  # of before there were keys
    assert store.add_event("done", replace(switched, at=3e3)) == 2e3
    store.close()


@pytest.mark.parametrize("version", [2, 3, 4, 5, 6, 7])
def test_its_jobs_can_be_looked_at(tmp_path: Path, version: int) -> None:
    store = Store(make_old(f"sqlite:///{tmp_path / 'old.db'}", version))
    overviews = Overviews(store)
    assert {summary.id for summary in overviews.job_list().jobs} >= {"done", "half"}
    done = overviews.overview("done")
    assert done.job.headline.startswith(
        "Tuned: the default stays" if version == 2 else "Tuning again"
    )
    assert len(done.steps.points) == len(store.observations("done"))
    assert done.job.figures.rank_spread_ratio is None
    assert overviews.buckets("done").tensors == 3
    assert overviews.curve("half").curves == ()
    store.close()


def test_its_jobs_go_on(old_url: str) -> None:
    store = Store(old_url)
    tensors = [tensor.model_dump(mode="json") for tensor in store.tensors("half")]
    assert not store.create_job("half", make_spec(name="half way", tensors=tensors), at=2e3)
    observed = [Observation(34, (0.2,) * 4)]
    assert store.add_observations("half", 0, observed, 2e3).new == observed
    following = Trial(1, "search", Configuration(bucket_bytes=1 << 20, hierarchical="off"))
    assert store.advance("half", Step(2e3, 0, failure="no", next_trial=following))
    newest, tuned = (store.latest_job(fingerprint="f" * 64, finished=f) for f in (False, True))
    assert newest is not None
    assert tuned is not None
    assert (newest.id, tuned.id) == ("half", "done")
    assert store.open_round("done", 2e3)
    store.close()


@pytest.mark.parametrize("version", [2, 3, 4, 5, 6, 7])
def test_it_ends_with_the_schema_of_a_new_database(
    empty_url: str, version: int, tmp_path: Path
) -> None:
    old_url = make_old(empty_url, version)
    Store(old_url).close()
    migrated = schema(old_url)
    if old_url.startswith("sqlite"):
        new_url = f"sqlite:///{tmp_path / 'new.db'}"
    else:
        new_url = old_url
        execute(old_url, "DROP SCHEMA public CASCADE", "CREATE SCHEMA public")
    Store(new_url).close()
    assert migrated == schema(new_url)
    if old_url.startswith("sqlite"):
        # Whoever asks for a job's revision must not read through its tensors.
        for url in (old_url, new_url):
            engine = create_engine(url)
            assert inspect(engine).get_columns("jobs")[-1]["name"] == "tensors"
            engine.dispose()


@pytest.mark.parametrize(
    ("version", "in_its_way", "gone", "name"),
    [
        (2, "CREATE TABLE profiles (somebody_elses BIGINT)", "DROP TABLE profiles", "profiles"),
        *(
            # Only after the columns of jobs were moved.
            (version, "CREATE INDEX jobs_by_creation ON trials (job_id)",
             "DROP INDEX jobs_by_creation", "jobs_by_creation")
            for version in (2, 3)
        ),
        (4, "CREATE INDEX events_by_key ON trials (job_id)", "DROP INDEX events_by_key",
         "events_by_key"),
        (5, "CREATE TABLE lives (somebody_elses BIGINT)", "DROP TABLE lives", "lives"),
        (6, "ALTER TABLE observations ADD COLUMN complexity TEXT",
         "ALTER TABLE observations DROP COLUMN complexity", "complexity"),
        (7, "ALTER TABLE trials ADD COLUMN memory TEXT",
         "ALTER TABLE trials DROP COLUMN memory", "memory"),
    ],
)  # fmt: skip
def test_what_fails_leaves_it_as_it_was(
    empty_url: str, version: int, in_its_way: str, gone: str, name: str
) -> None:
    url = make_old(empty_url, version)
    execute(url, in_its_way)
    before = schema(url), contents(url)
    with pytest.raises(StoreError, match=rf"stays at schema version {version}.*{name}"):
        Store(url)
    assert (schema(url), contents(url)) == before
    execute(url, gone)
    Store(url).close()


@pytest.mark.parametrize("version", [2, 3, 4, 5, 6, 7])
def test_who_only_reads_does_not_bring_it_up(empty_url: str, version: int) -> None:
    url = make_old(empty_url, version)
    before = schema(url), contents(url)
    with pytest.raises(OtherSchema, match=r"is of an older release.*start this release's service"):
        Store(url, as_found=True)
    assert (schema(url), contents(url)) == before
    Store(url).close()
    reader = Store(url, as_found=True)
    assert reader.job("done").name
    reader.close()


def test_it_gives_way_to_who_uses_the_tables_and_keeps_nobody_waiting(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As to pg_dump, which reads all tables in one transaction."""
    monkeypatch.setattr(migrations, "PAUSE_SECONDS", 0.05)
    caplog.set_level(logging.INFO)
    with own_database(postgresql_url) as url:
        make_old(url, 7)
        engine = create_engine(url)
        with ThreadPoolExecutor(1) as pool, engine.connect() as copying:
            copying.exec_driver_sql("SELECT count(*) FROM trials")
            opening = pool.submit(Store, url)
            while "tables are in use" not in caplog.text:
                time.sleep(0.01)
            longest = 0.0
            for _ in range(20):
                began = time.monotonic()
                with engine.connect() as connection:
                    connection.exec_driver_sql("SELECT count(*) FROM trials")
                longest = max(longest, time.monotonic() - began)
            assert longest < 2 * migrations.LOCK_SECONDS + 1
            assert not opening.done()
            copying.rollback()
            opening.result().close()
        engine.dispose()
        assert contents(url)["schema_version"] == [(SCHEMA_VERSION,)]


def test_a_family_that_the_release_before_writes_gets_another_revision(postgresql_url: str) -> None:
    with own_database(postgresql_url) as url:
        make_old(url, 7)
        store = Store(url)
        store.add_family("name", "key", {"label": "before"})
        found = store.family_of("name")
        assert found is not None
        execute(url, """UPDATE families SET data = '{"label": "after"}'""")
        stale = store.replace_family("name", "key", found.revision, "{}", "job")
        after = store.family_of("name")
        assert stale is None
        assert after is not None
        assert after.revision == found.revision + 1
        assert store.replace_family("name", "key", after.revision, "{}", "job") is not None
        last = store.family_of("name")
        assert last is not None
        assert last.revision == after.revision + 1, "raised once, not twice"
        store.close()


def test_who_only_reads_does_not_make_one(empty_url: str) -> None:
    execute(empty_url)  # SQLite makes an empty file
    with pytest.raises(StoreError, match="no service has used it"):
        Store(empty_url, as_found=True)
    assert schema(empty_url) == {}


@pytest.mark.parametrize(
    ("version", "jobs"), [(None, 0), (2, 2), (3, 3), (4, 3), (5, 3), (6, 3), (7, 3)]
)
def test_replicas_that_start_at_once_find_one_database(
    empty_url: str, version: int | None, jobs: int
) -> None:
    if version is not None:
        make_old(empty_url, version)
    barrier = threading.Barrier(4)
    failures: list[BaseException] = []

    def start(number: int) -> None:
        barrier.wait()
        try:
            store = Store(empty_url)
            store.create_job(f"of-{number}", make_spec(), at=2e3)
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
    assert [tuple(row) for row in found["schema_version"]] == [(SCHEMA_VERSION,)]
    assert len(found["jobs"]) == jobs + 4


@pytest.mark.parametrize(("version", "age"), [(99, "newer"), (1, "older")])
def test_a_schema_that_this_release_does_not_know_is_left_alone(
    old_url: str, version: int, age: str
) -> None:
    execute(old_url, f"UPDATE schema_version SET version = {version}")
    before = schema(old_url), contents(old_url)
    for as_found in (False, True):
        with pytest.raises(OtherSchema, match=f"{age} schema version {version}"):
            Store(old_url, as_found=as_found)
    assert (schema(old_url), contents(old_url)) == before

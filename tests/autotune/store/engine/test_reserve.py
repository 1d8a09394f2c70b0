"""On a full disk jobs can be deleted."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner
from flask.testing import FlaskClient
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.exc import SQLAlchemyError

from bagua_autotune.app import create_app
from bagua_autotune.cli import main
from bagua_autotune.settings import Settings
from bagua_autotune.store import Store
from bagua_autotune.upkeep import Upkeep
from tests.autotune.store import disks, postgresql
from tests.autotune.support import make_spec, registration, stored_jobs

AGES_AGO = 1.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with disks.mounted(tmp_path / "disk", 4) as point:
        yield point


@pytest.fixture
def store(disk: Path) -> Iterator[Store]:
    with closing(Store(f"sqlite:///{disk / 'a.db'}")) as opened:
        yield opened


def register_until_full(client: FlaskClient) -> int:
    number = 0
    while client.put(f"/api/v2/jobs/job{number}", json=registration()).status_code == 201:
        number += 1
    return number


def test_jobs_are_deleted_where_they_have_filled_the_disk(store: Store, disk: Path) -> None:
    (disk / "other").write_bytes(bytes(1024**2))
    client = create_app(Settings(), store).test_client()
    count = register_until_full(client)
    assert client.get("/readyz").status_code == 503
    for number in range(count):
        gone = client.delete(f"/api/v2/jobs/job{number}?force=true")
        assert gone.status_code == 200, (number, gone.get_data(as_text=True))
    assert client.get("/readyz").status_code == 200
    assert register_until_full(client) > count // 2, "the room is there again"


def test_a_job_is_deleted_where_others_have_filled_the_disk(store: Store, disk: Path) -> None:
    store.jobs.create("job", make_spec(), at=AGES_AGO)
    disks.fill(disk / "other")
    reserved = (disk / "a.db-reserve").stat()
    assert (reserved.st_mode & 0o777, reserved.st_size) == (0o600, 1024**2)
    client = create_app(Settings(), store).test_client()
    assert client.delete("/api/v2/jobs/job").status_code == 200
    assert (disk / "a.db-reserve").stat().st_size == 1024**2, "it is there for the next one"


def test_the_command_deletes_on_a_full_disk_without_a_service(disk: Path) -> None:
    url = f"sqlite:///{disk / 'a.db'}"
    with closing(Store(url)) as store:
        for job in ("one", "two"):
            store.jobs.create(job, make_spec(), at=AGES_AGO)
    disks.fill(disk / "other")  # also the room of SQLite's logs, which are gone
    for command in (["delete", "one"], ["prune", "--older-than", "1"]):
        done = CliRunner().invoke(main, [*command, "--database", url])
        assert done.exit_code == 0, done.output
    with closing(Store(url, as_found=True)) as store:
        assert stored_jobs(store) == []


def test_the_service_deletes_old_jobs_on_a_full_disk(store: Store, disk: Path) -> None:
    store.jobs.create("job", make_spec(), at=AGES_AGO)
    disks.fill(disk / "other")
    assert Upkeep(store, thin_days=7, keep_days=90).once()
    assert stored_jobs(store) == []


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """One that PostgreSQL's user reaches, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="autotune-disk-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_jobs_are_deleted_where_the_disk_of_postgresql_is_full(
    postgresql_url: str, public_folder: Path
) -> None:
    """Its log is on another disk here: without room for that, PostgreSQL itself stops."""
    server = create_engine(postgresql_url, isolation_level="AUTOCOMMIT")
    with disks.mounted(public_folder / "disk", 24) as point, server.connect() as connection:
        if postgresql.USER:
            shutil.chown(point, postgresql.USER)
        connection.execute(text(f"CREATE TABLESPACE small LOCATION '{point}'"))
        connection.execute(text("CREATE DATABASE small TABLESPACE small"))
        try:
            url = make_url(postgresql_url).set(database="small")
            with closing(Store(url.render_as_string(hide_password=False))) as store:
                client = create_app(Settings(), store).test_client()
                disks.fill(point / "other")
                count = register_until_full(client)
                with pytest.raises(SQLAlchemyError, match="No space left on device"):
                    store.jobs.create("next", make_spec(), at=AGES_AGO)
                for number in range(count):
                    gone = client.delete(f"/api/v2/jobs/job{number}?force=true")
                    assert gone.status_code == 200, (number, gone.get_data(as_text=True))
        finally:
            connection.execute(text("DROP DATABASE small WITH (FORCE)"))
            connection.execute(text("DROP TABLESPACE small"))
    server.dispose()

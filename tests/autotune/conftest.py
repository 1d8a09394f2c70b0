"""The real app on a real store, and databases to test on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from flask import Flask
from flask.testing import FlaskClient
from sqlalchemy import create_engine, make_url, text

from bagua_autotune.app import create_app
from bagua_autotune.settings import Settings
from bagua_autotune.store import Store
from bagua_autotune.store.engine.tables import Base
from bagua_autotune.tuning.tuner import Tuner
from tests.autotune.store.postgresql import find_binaries, running_cluster
from tests.autotune.support import Clock, make_spec


@pytest.fixture
def store() -> Iterator[Store]:
    opened = Store("sqlite://")
    yield opened
    opened.close()


@pytest.fixture(params=["file", "memory", "postgresql"])
def every_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An empty store on each kind of database."""
    if request.param == "postgresql":
        url = request.getfixturevalue("postgresql_url")
    else:
        urls = {"file": f"sqlite:///{tmp_path / 'new' / 'autotune.db'}", "memory": "sqlite://"}
        url = urls[request.param]
    opened = Store(url)
    with opened.database.writing() as run:
        for table in reversed(Base.metadata.sorted_tables):
            if table.name != "schema_version":
                run(table.delete())
    yield opened
    opened.close()


@pytest.fixture
def tuner(store: Store) -> Tuner:
    return Tuner(store)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def job(store: Store) -> str:
    assert store.jobs.create("job", make_spec(), at=1.0)
    return "job"


@pytest.fixture
def app(store: Store) -> Flask:
    return create_app(Settings(database="sqlite://"), store)


@pytest.fixture
def client(app: Flask) -> FlaskClient:
    return app.test_client()


@pytest.fixture(scope="session")
def postgresql_url() -> Iterator[str]:
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed")
    with running_cluster(binaries) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database of the test's own."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'autotune.db'}"
        return
    server = create_engine(request.getfixturevalue("postgresql_url"), isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.execute(text("CREATE DATABASE empty"))
        yield make_url(server.url).set(database="empty").render_as_string(hide_password=False)
        connection.execute(text("DROP DATABASE empty WITH (FORCE)"))
    server.dispose()

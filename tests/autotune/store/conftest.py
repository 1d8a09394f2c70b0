"""Databases to test on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bagua_autotune.store import Store
from bagua_autotune.store.tables import Base
from tests.autotune.support import make_spec


@pytest.fixture(params=["file", "memory", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "postgresql":
        url = request.getfixturevalue("postgresql_url")
    else:
        urls = {"file": f"sqlite:///{tmp_path / 'new' / 'autotune.db'}", "memory": "sqlite://"}
        url = urls[request.param]
    opened = Store(url)
    with opened.database.writing() as session:
        for table in reversed(Base.metadata.sorted_tables):
            if table.name != "schema_version":
                session.execute(table.delete())
    yield opened
    opened.close()


@pytest.fixture
def job(store: Store) -> str:
    assert store.create_job("job", make_spec(), at=1.0)
    return "job"

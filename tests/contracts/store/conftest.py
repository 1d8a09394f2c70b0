"""What every database that holds a store must do: a file of SQLite, one in memory, PostgreSQL."""

from __future__ import annotations

import pytest

from bagua_autotune.store import Store
from tests.autotune.conftest import every_store, job, postgresql_url

__all__ = ["every_store", "job", "postgresql_url", "store"]


@pytest.fixture
def store(every_store: Store) -> Store:
    return every_store

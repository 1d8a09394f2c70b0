"""Every test of the store runs on every database."""

from __future__ import annotations

import pytest

from bagua_autotune.store import Store


@pytest.fixture
def store(every_store: Store) -> Store:
    return every_store

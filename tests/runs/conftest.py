"""Databases to test on: those of the service's tests."""

from __future__ import annotations

from tests.autotune.conftest import every_store, postgresql_url, store

__all__ = ["every_store", "postgresql_url", "store"]

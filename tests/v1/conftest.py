"""The service and the databases that its own tests have."""

from tests.autotune.conftest import app, client, empty_url, every_store, job, postgresql_url, store

__all__ = ["app", "client", "empty_url", "every_store", "job", "postgresql_url", "store"]

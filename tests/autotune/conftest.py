"""The real app on a real store, for tests of the HTTP APIs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from flask import Flask
from flask.testing import FlaskClient

from bagua_autotune.app import create_app
from bagua_autotune.settings import Settings
from bagua_autotune.store import Store


@pytest.fixture
def store() -> Iterator[Store]:
    opened = Store("sqlite://")
    yield opened
    opened.close()


@pytest.fixture
def app(store: Store) -> Flask:
    return create_app(Settings(database="sqlite://"), store)


@pytest.fixture
def client(app: Flask) -> FlaskClient:
    return app.test_client()

from __future__ import annotations

import pytest

from bagua_autotune.store import Store, StoreError
from bagua_autotune.store.url import parse, shown


@pytest.mark.parametrize(
    "text",
    [
        "postgresql+pg8000:/user:hunter2@host/db",
        "postgresql+pg8000:user:hunter2@host/db",
        "user:hunter2@host/db",
        "postgresql+pg8000://user@host:hunter2/db",
        "postgresql+pg8000://user:hunter2/db",
        "postgresql+pg8000://user:p@hunter2@host/db",
        "postgresql+pg8000://user:p@ss/hunter2@host/db",
        "postgresql+pg8000:///user:hunter2@host/db",
        "",
    ],
)
def test_what_is_no_url_is_not_repeated(text: str) -> None:
    """A password in the wrong place must not get into the log."""
    with pytest.raises(StoreError, match=r"BAGUA_AUTOTUNE_DATABASE.*postgresql\+pg8000://") as told:
        Store(text)
    assert "hunter2" not in str(told.value)
    assert told.value.__cause__ is None


@pytest.mark.parametrize(
    ("text", "without"),
    [
        ("postgresql+pg8000://u:hunter2@h:5432/db", "postgresql+pg8000://u:***@h:5432/db"),
        ("postgresql+pg8000://u:p%40hunter2@h/db", "postgresql+pg8000://u:***@h/db"),
        ("postgresql://h/db?password=hunter2&user=u", "postgresql://h/db?password=hidden&user=u"),
        ("postgresql://h/db?sslPassword=hunter2", "postgresql://h/db?sslPassword=hidden"),
        ("mssql+pyodbc:///?odbc_connect=PWD%3Dhunter2", "mssql+pyodbc:///?odbc_connect=hidden"),
        ("sqlite:////data/me@home.db", "sqlite:////data/me%40home.db"),
        ("sqlite:///a.db?mode=ro&timeout=3", "sqlite:///a.db?mode=ro&timeout=3"),
    ],
)
def test_it_is_shown_without_its_password(text: str, without: str) -> None:
    assert shown(parse(text)) == without


def test_a_database_that_cannot_be_reached_is_named_without_its_password() -> None:
    url = "postgresql+pg8000://user:hunter2@127.0.0.1:1/db?password=hunter2"
    with pytest.raises(StoreError, match=r"user:\*\*\*@127.0.0.1:1/db.*cannot be used") as told:
        Store(url)
    assert "hunter2" not in str(told.value)

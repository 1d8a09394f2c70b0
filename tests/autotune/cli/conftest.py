"""The two places that the commands read: a database, or a service that runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bagua_autotune.cli import main

TOKEN = "a-secret"


def run(*arguments: str, answer: str | None = None) -> Result:
    """A command of this process, and what is typed."""
    return CliRunner().invoke(main, arguments, input=answer)


@pytest.fixture(params=["database", "service"])
def source(
    request: pytest.FixtureRequest, database: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Options that name the place; the module has both as fixtures, the service with the token."""
    if request.param == "database":
        return ["--database", f"sqlite:///{database}"]
    monkeypatch.setenv("BAGUA_AUTOTUNE_TOKEN", TOKEN)
    return ["--url", request.getfixturevalue("service")]

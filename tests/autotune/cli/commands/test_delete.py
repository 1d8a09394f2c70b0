"""``delete --everything``: nothing of what docs/stored.md names is left on this host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import select

from bagua_autotune.store import Store
from bagua_autotune.store.engine import location
from bagua_autotune.store.engine.tables import Base
from tests.autotune.cli.conftest import run
from tests.autotune.support import make_spec

delete = partial(run, "delete")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What trainings of this user have left."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    for name in ("BAGUA_AUTOTUNE_DATABASE", "BAGUA_AUTOTUNE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(location, "NODE_FOLDER", str(tmp_path / "node-{user}"))
    folder = tmp_path / "bagua-autotune"
    with closing(Store(f"sqlite:///{folder / 'autotune.db'}")) as store:
        store.jobs.create("job", make_spec(), at=1.0)
    (folder / "copies").mkdir()
    (folder / "copies" / "damaged.copy").write_bytes(b"?")
    (folder / "mine.txt").write_text("no file of ours")
    return folder


def test_everything_goes_once_it_is_confirmed(home: Path) -> None:
    asked = delete("--everything", answer="n\n")
    assert asked.exit_code == 1
    assert str(home / "autotune.db") in asked.stdout
    assert f"the folder {home / 'copies'}" in asked.stdout
    assert (home / "autotune.db").exists()
    assert delete("--everything", answer="y\n").exit_code == 0
    assert {path.name for path in home.iterdir()} == {"mine.txt"}
    again = delete("--everything", "--force")
    assert (again.exit_code, again.stderr) == (0, "nothing is stored here\n")


def test_by_force_nothing_is_asked(home: Path) -> None:
    assert delete("--everything", "--force").exit_code == 0
    assert {path.name for path in home.iterdir()} == {"mine.txt"}


def test_nothing_goes_while_somebody_uses_the_database(home: Path) -> None:
    with closing(Store(f"sqlite:///{home / 'autotune.db'}")) as store:
        refused = delete("--everything", "--force")
        assert refused.exit_code == 1
        assert "is in use, and nothing is changed; stop the service" in refused.stderr
        assert store.jobs.get("job").id == "job"
    assert (home / "copies" / "damaged.copy").exists()


@pytest.fixture
def server(empty_url: str) -> Iterator[Store]:
    with closing(Store(empty_url)) as store:
        store.jobs.create("job", make_spec(), at=1.0)
        yield store


@pytest.mark.parametrize("empty_url", ["postgresql"], indirect=True)
def test_all_rows_of_a_server_go(home: Path, server: Store) -> None:
    url = server.database.url.render_as_string(hide_password=False)
    assert delete("--everything", "--force", "--database", url).exit_code == 0
    left = {
        name: len(server.database.read(select(table)))
        for name, table in Base.metadata.tables.items()
    }
    assert left.pop("schema_version") == 1
    assert set(left.values()) == {0}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name either a JOB or --everything"),
        (["job", "--everything"], "name either a JOB or --everything"),
        (["--everything", "--url", "http://127.0.0.1:9"], "--everything is not for a service"),
    ],
)
def test_what_it_cannot_do_is_said(home: Path, arguments: list[str], words: str) -> None:
    refused = delete(*arguments)
    assert refused.exit_code != 0
    assert words in refused.stderr
    assert (home / "autotune.db").exists()

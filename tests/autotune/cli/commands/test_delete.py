"""``delete --everything``: nothing of what docs/stored.md names is left on this host.
``prune`` and ``delete JOB``, on a database and through a running service."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import select

from bagua_autotune.store import Store
from bagua_autotune.store.engine import location
from bagua_autotune.store.engine.tables import Base
from bagua_autotune.store.maintenance.retention import DAY_SECONDS
from tests.autotune.cli.conftest import TOKEN, run
from tests.autotune.server import ServeProcess
from tests.autotune.support import make_spec, stored_jobs

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


prune = partial(run, "prune", "--older-than", "90")


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A job last heard of 91 days ago and another of 89 days ago."""
    path, now = tmp_path / "a.db", time.time()
    store = Store(f"sqlite:///{path}")
    store.jobs.create("old", make_spec(name="ancient"), at=now - 91 * DAY_SECONDS)
    store.jobs.create("new", make_spec(), at=now - 89 * DAY_SECONDS)
    store.close()
    return path


@pytest.fixture
def service(database: Path) -> Iterator[str]:
    # Else it might delete the job itself.
    with ServeProcess(database, "--keep-days", "0", BAGUA_AUTOTUNE_TOKEN=TOKEN) as running:
        yield running.url


def stored(database: Path) -> list[str]:
    store = Store(f"sqlite:///{database}")
    found = [job.id for job in stored_jobs(store)]
    store.close()
    return found


def test_old_jobs_are_deleted_and_listed(source: list[str], database: Path) -> None:
    result = prune(*source)
    header, row = (line.split("\t") for line in result.stdout.splitlines())
    assert header == ["job", "name", "state", "last contact"]
    assert row[:3] == ["old", "ancient", "tuning"]
    assert stored(database) == ["new"]
    assert result.stderr == ""


def test_a_dry_run_lists_what_would_go_and_deletes_nothing(
    source: list[str], database: Path
) -> None:
    tried = prune("--dry-run", *source)
    assert tried.exit_code == 0
    assert tried.stderr == "nothing is deleted: without --dry-run 1 job would be\n"
    assert stored(database) == ["new", "old"]
    assert prune(*source).stdout == tried.stdout


def test_a_service_deletes_nothing_for_who_has_not_its_token(
    service: str, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BAGUA_AUTOTUNE_TOKEN", raising=False)
    result = prune("--url", service)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"{service} answered 401: " in result.stderr
    assert stored(database) == ["new", "old"]


def test_a_job_is_deleted_by_its_name_or_id(source: list[str], database: Path) -> None:
    result = run("delete", "ancient", *source)
    assert result.exit_code == 0, result.output
    header, row = (line.split("\t") for line in result.stdout.splitlines())
    assert header == ["job", "name", "state", "last contact"]
    assert row[:2] == ["old", "ancient"]
    assert stored(database) == ["new"]
    again = run("delete", "old", *source)
    assert (again.exit_code, again.stdout) == (1, "")
    assert "there is no job 'old'" in again.stderr


def test_one_whose_training_may_run_is_deleted_only_by_force(
    source: list[str], database: Path
) -> None:
    store = Store(f"sqlite:///{database}")
    store.jobs.create("runs", make_spec(), at=time.time())
    store.close()
    refused = run("delete", "runs", *source)
    assert refused.exit_code == 1
    assert "job runs may still run" in refused.stderr
    assert stored(database) == ["runs", "new", "old"]
    assert run("delete", "runs", "--force", *source).exit_code == 0
    assert stored(database) == ["new", "old"]


@pytest.mark.parametrize(
    ("source", "command"),
    [("service", ["delete", "old"]), ("database", ["prune", "--older-than", "90"])],
    indirect=["source"],
)
def test_copies_on_this_host_go_with_their_job(
    source: list[str], command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As trainings write them: tests/client/reporter/test_copies.py."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    folder = tmp_path / "bagua-autotune" / "copies"
    folder.mkdir(parents=True)
    kept = {"first": ["old", "older"], "second": ["young", "old"], "third": ["new"]}
    for name, ids in kept.items():
        copy = json.dumps({"jobs": [{"id": job_id} for job_id in ids]}).encode()
        (folder / f"{name}.copy").write_bytes(b"1000.0\n" + zlib.compress(copy))
    (folder / "damaged.copy").write_bytes(b"1000.0\n?")
    assert run(*command, *source).exit_code == 0
    assert {file.name for file in folder.iterdir()} == {"third.copy", "damaged.copy"}

"""``prune`` and ``delete``, on a database and through a running service."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from bagua_autotune.store import Store
from bagua_autotune.store.maintenance.retention import DAY_SECONDS
from tests.autotune.cli.conftest import TOKEN, run
from tests.autotune.server import ServeProcess
from tests.autotune.support import make_spec, stored_jobs

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
    """As trainings write them: tests/client/reporter/test_handover.py."""
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

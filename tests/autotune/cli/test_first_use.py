"""The commands of a user on whose machine no job was ever tuned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bagua_autotune.store import Store
from tests.autotune.cli.canned_service import CannedService
from tests.autotune.cli.conftest import run


@pytest.fixture
def nothing_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user whose first command this is."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for name in ("BAGUA_AUTOTUNE_DATABASE", "BAGUA_AUTOTUNE_URL"):
        monkeypatch.delenv(name, raising=False)


NO_JOBS = "No jobs yet: start a training with BAGUA_AUTOTUNE=1"


@pytest.mark.parametrize("command", [["jobs"], ["prune", "--older-than", "1"]])
def test_before_the_first_training_there_are_no_jobs_and_that_is_no_error(
    nothing_yet: None, tmp_path: Path, command: list[str]
) -> None:
    result = run(*command)
    assert (result.exit_code, result.stderr) == (0, f"{NO_JOBS}\n")
    assert not (tmp_path / "data").exists()


def test_before_the_first_training_the_list_is_empty_in_json_too(nothing_yet: None) -> None:
    result = run("jobs", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (0, {"jobs": [], "next": None})


@pytest.mark.parametrize("command", [["show", "x"], ["export", "x", "--csv"], ["watch", "x"]])
def test_before_the_first_training_no_job_can_be_shown(
    nothing_yet: None, command: list[str]
) -> None:
    result = run(*command)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"Error: {NO_JOBS} (there is no database sqlite:///" in result.stderr


def test_an_empty_database_has_no_jobs_yet(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    Store(url).close()
    result = run("jobs", "--database", url)
    assert (result.exit_code, result.stderr) == (0, f"{NO_JOBS}\n")


def test_a_service_without_jobs_says_how_a_training_finds_it() -> None:
    """It runs already: nothing is to be started but a training."""
    answers = {"/jobs": {"jobs": [], "next": None}}
    with CannedService(answers) as service:
        result = run("jobs", "--url", service.url)
    said = f"{NO_JOBS} BAGUA_AUTOTUNE_URL={service.url}\n"
    assert (result.exit_code, result.stderr) == (0, said)

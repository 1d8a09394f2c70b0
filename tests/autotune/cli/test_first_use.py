"""The commands of a user on whose machine no job was ever tuned; commands of other packages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from bagua_autotune.cli import COMMANDS, OF_OUR_PACKAGES, main
from bagua_autotune.store import Store
from tests.autotune.cli.conftest import CannedService, run


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


STRANGER = """
import click

@click.command()
def greet():
    click.echo("good morning")
"""
ENTRIES = """
[bagua_autotune.commands]
greet = stranger:greet
lost = left_out.commands:lost
serve = stranger:greet
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a package of a stranger is installed that has a command, and names one of a package
    that is not there."""
    metadata = tmp_path / "stranger-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRIES)
    (tmp_path / "stranger.py").write_text(STRANGER)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_a_strangers_command_is_listed_and_runs() -> None:
    assert "greet     A command of stranger." in CliRunner().invoke(main, "--help").output
    assert CliRunner().invoke(main, "greet").output == "good morning\n"


@pytest.mark.usefixtures("folder")
def test_a_command_whose_package_is_missing_says_so_in_a_sentence() -> None:
    result = CliRunner().invoke(main, "lost")
    assert result.exit_code == 1
    assert result.output == "Error: lost comes with the package left_out, which is not installed\n"


@pytest.mark.usefixtures("folder")
def test_none_takes_the_place_of_a_command_of_the_service() -> None:
    listed = main.list_commands(click.Context(main))
    assert listed == [*COMMANDS, *listed[len(COMMANDS) :]]
    assert {*listed} == {*COMMANDS, *OF_OUR_PACKAGES, "greet", "lost"}
    assert "Run the service" in CliRunner().invoke(main, ["serve", "--help"]).output


def test_listing_the_commands_imports_none(folder: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(folder)!r})
from bagua_autotune.cli import main
main(["--help"], standalone_mode=False)
print({{"stranger", "left_out", "bagua_simulator"}} & set(sys.modules))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "\n  lost " in run.stdout
    assert run.stdout.endswith("set()\n")

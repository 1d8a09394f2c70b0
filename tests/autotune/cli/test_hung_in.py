"""Commands of other packages, which hang in by entry points."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from bagua_autotune.cli import COMMANDS, OF_OUR_PACKAGES, main

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

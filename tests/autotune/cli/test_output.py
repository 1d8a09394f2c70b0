"""What the commands draw on terminals of any width, and what never reaches one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bagua_autotune.cli import main, output
from bagua_autotune.model.job import Trial
from bagua_autotune.store import Store
from bagua_autotune.store.trials import Move
from bagua_wire.configuration import Configuration
from tests.autotune.support import make_spec


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize("color", ["", "1"])
def test_nothing_that_ranks_say_is_obeyed_by_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, color: str
) -> None:
    monkeypatch.setenv("FORCE_COLOR", color)
    monkeypatch.setenv("COLUMNS", "300")
    url = f"sqlite:///{tmp_path / 'a.db'}"
    store = Store(url)
    store.jobs.create("evil", make_spec(), at=1.0)
    trial = Trial(0, "search", Configuration(make_spec().default_configuration))
    store.trials.advance("evil", Move(1.0, next_trial=trial))
    following = replace(trial, index=1)
    failed = Move(2.0, closes=0, failure="\x1b[2J\x1b[31mpwned\nline\ttab", next_trial=following)
    assert store.trials.advance("evil", failed)
    store.close()
    for arguments in (["show", "evil"], ["jobs"], ["export", "evil", "--csv"]):
        result = run(*arguments, "--database", url)
        assert result.exit_code == 0, result.output
        assert "\x1b[2J" not in result.stdout
        assert "pwned\nline" not in result.stdout
        assert "\ttab" not in result.stdout
    assert "\\x1b[2J" in run("show", "evil", "--database", url).stdout


def test_a_terminal_gets_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    for columns in ("200", "20"):
        monkeypatch.setenv("COLUMNS", columns)
        output.print_table(["name", "trials"], [["[b]x", "1"]])
        text = capsys.readouterr().out
        assert "\t" not in text
        assert "[b]x" in text, "a name must not be taken for markup"


@pytest.mark.parametrize("columns", [80, 40, 300])
def test_on_a_narrow_terminal_nothing_of_a_trial_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    store = Store(url)
    store.jobs.create("job", make_spec(), at=1.0)
    first = Trial(0, "search", Configuration(make_spec().default_configuration))
    store.trials.advance("job", Move(2.0, next_trial=first))
    failure = "rank 3 could not build the buckets: " + " ".join(f"word{n}" for n in range(20))
    store.trials.advance("job", Move(3.0, closes=0, failure=failure))
    store.close()
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    drawn = run("show", "job", "--database", url).stdout
    assert "\u2026" not in drawn
    plain = re.sub(r"\x1b\[[0-9;]*m", "", drawn)
    head, table = plain.partition("\n")[0], plain.partition("\n")[2].partition("in short: ")[0]
    assert head == "job digits (job): tuning"
    assert max(map(len, table.splitlines())) <= columns
    words = table.split()
    assert "bucket 25 MiB, flat" in " ".join(words)
    assert set(failure.split()) <= set(words)

"""What the commands draw on terminals of any width, and what never reaches one."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bagua_autotune.cli import output
from bagua_autotune.cli.overview_panel import BLOCKS, OverviewPanel, condense, sparkline
from bagua_autotune.cli.reader import DatabaseReader
from bagua_autotune.model.job import Trial
from bagua_autotune.store import Store
from bagua_autotune.store.trials import Move
from bagua_autotune.views.overviews import JobOverview
from bagua_wire.configuration import Configuration
from tests.autotune.cli.conftest import JOB, DrivenJob, run
from tests.autotune.support import make_spec


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


NUMBERS = st.lists(st.floats(1e-9, 1e9), max_size=300)


@given(NUMBERS, st.integers(0, 90))
def test_it_is_never_wider_and_shows_the_lowest_lowest_and_the_highest_highest(
    values: list[float], width: int
) -> None:
    line = sparkline(values, width)
    assert len(line) == min(len(values), width)
    shares = condense(values, width)
    assert all(min(values) <= share <= max(values) for share in shares)
    if line and min(shares) < max(shares):
        assert line[shares.index(min(shares))] == BLOCKS[0]
        assert line[shares.index(max(shares))] == BLOCKS[-1]


def test_a_share_is_shown_by_its_median_so_that_one_slow_step_is_not_seen() -> None:
    assert condense([1.0, 1.0, 9.0, 2.0, 2.0, 2.0], 2) == [1.0, 2.0]
    assert sparkline([1.0, 1.0, 9.0, 2.0, 2.0, 2.0], 2) == "▁█"
    assert sparkline([3.0, 3.0], 9) == "▁▁"


NAME = "[red]d[/]"


@pytest.fixture(scope="module")
def overviews(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, JobOverview]]:
    """The same job when it begins, in its fourth trial and when it is tuned."""
    database = tmp_path_factory.mktemp("panel") / "a.db"
    job = DrivenJob(database, NAME)
    reader = DatabaseReader(f"sqlite:///{database}")
    found = {}
    for moment, trial in (("beginning", 0), ("midway", 3), ("tuned", 1000)):
        job.run(until_trial=trial)
        overview = reader.overview(JOB)
        # However long the tests take, it is no silence.
        heard = overview.job.last_contact_at + 3600.0
        told = overview.job.model_copy(update={"last_contact_at": heard})
        found[moment] = overview.model_copy(update={"job": told})
    yield found
    job.close()


def draw(overview: JobOverview, width: int, trouble: str = "", encoding: str = "utf-8") -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, record=True, force_terminal=True)
    console.print(OverviewPanel(overview, trouble))
    return "\n".join(line.rstrip() for line in console.export_text().splitlines())


def rows(text: str) -> dict[str, str]:
    """By label, what stands beside it; lines that go on have no label."""
    found: dict[str, str] = {}
    label = ""
    for line in text.splitlines():
        label = line[:9].strip() or label
        found[label] = f"{found.get(label, '')} {line[9:].strip()}".strip()
    return found


@pytest.mark.parametrize("width", [100, 60, 30])
def test_midway_all_that_is_asked_for_is_there_and_no_line_is_too_wide(
    overviews: dict[str, JobOverview], width: int
) -> None:
    overview = overviews["midway"]
    text = draw(overview, width)
    assert max(map(len, text.splitlines())) <= width
    shown = rows(text)
    figures = overview.job.figures
    gain = r"[\d.]+x \([\d.]+ to [\d.]+\) of" if figures.speedup else "noise:"
    most = rf" at most {figures.ceiling:.2f}x" + ("" if figures.speedup else " is possible")
    assert shown["job"].split() == [NAME, "tuning"]
    assert re.search(
        r"\b4 of at most \d+, (at most [\d.]+ (s|min)|under 1 s) left$", shown["trials"]
    )
    assert shown["now"] == "trial 3: bucket 22.6 MiB, hierarchical"
    assert re.fullmatch(
        rf"trial 2: bucket 4 MiB, flat; \d+ ms per step, {gain}{most}", shown["best"]
    )
    assert re.fullmatch(r"bucket 25 MiB, flat; \d+ ms per step", shown["default"])
    assert re.fullmatch(r"[▁█▂]+ \d+ ms to \d+ ms, steps 1 to 40", shown["steps"])
    exposed = r"\d+(\.\d)? ms of communication that computing does not hide, in what runs now, "
    assert re.fullmatch(rf"{exposed}\d+(\.\d)? ms by default", shown["exposed"])
    assert shown["slowest"] == "rank 2 in 100% of the latest steps, by 30% of a step"
    assert "trouble" not in shown


def test_before_anything_is_known_nothing_is_claimed(overviews: dict[str, JobOverview]) -> None:
    shown = rows(draw(overviews["beginning"], 80))
    assert shown["best"] == "not known yet"
    assert shown["default"] == "bucket 25 MiB, flat"
    assert set(shown) == {"job", "trials", "now", "best", "default"}


def test_of_a_tuned_job_the_cost_is_told_and_no_time_left(
    overviews: dict[str, JobOverview],
) -> None:
    shown = rows(draw(overviews["tuned"], 80))
    figures = overviews["tuned"].job.figures
    assert shown["job"].split() == [NAME, "finished"]
    assert shown["trials"] == str(len(overviews["tuned"].trials))
    assert shown["now"] == "bucket 4 MiB, hierarchical"
    assert shown["cost"].startswith(f"{figures.cost_steps:.3g} steps of the default (")
    assert shown["cost"].endswith(f", paid back after {figures.payback_steps} steps")


def test_what_others_wrote_does_nothing_to_the_terminal(
    overviews: dict[str, JobOverview],
) -> None:
    text = draw(overviews["midway"], 60, trouble="\x1b[2J[bold]gone[/bold]")
    assert rows(text)["trouble"] == r"\x1b[2J[bold]gone[/bold]"


def test_a_terminal_without_blocks_gets_the_extremes_only(
    overviews: dict[str, JobOverview],
) -> None:
    text = draw(overviews["midway"], 60, encoding="ascii")
    assert text.isascii()
    assert re.fullmatch(r"\d+ ms to \d+ ms, steps 1 to 40", rows(text)["steps"])


def test_a_job_that_says_nothing_any_more_is_shown_as_that(
    overviews: dict[str, JobOverview],
) -> None:
    def silent(moment: str, seconds: float = 300, **changes: Any) -> dict[str, str]:
        past = time.time() - seconds
        changes = {"last_contact_at": past, **changes}
        job = overviews[moment].job.model_copy(update=changes)
        return rows(draw(overviews[moment].model_copy(update={"job": job}), 80))

    assert silent("midway")["trouble"] == "the job last reported 5.0 min ago"
    # Of steps of 0.2 s 30 are missing; before the first step nobody knows how long one takes.
    assert silent("midway", 6)["trouble"] == "the job last reported 6 s ago"
    assert "trouble" not in silent("beginning", 6)
    assert "trouble" in silent("beginning")
    slow = overviews["midway"].job.figures.model_copy(update={"current_seconds": 20.0})
    assert "trouble" not in silent("midway", figures=slow)
    # It waits for the service, and a tuned job has nothing to say.
    assert "trouble" not in silent("midway", deciding=True)
    assert "trouble" not in silent("tuned")


def test_a_rank_is_called_slow_where_the_figures_do(overviews: dict[str, JobOverview]) -> None:
    overview = overviews["midway"]
    even = overview.job.figures.model_copy(update={"rank_spread_ratio": 0.05, "slow_rank": None})
    job = overview.job.model_copy(update={"figures": even})
    assert "slowest" not in rows(draw(overview.model_copy(update={"job": job}), 80))

"""What is drawn of a job, at several widths."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from bagua_autotune.cli.overview_panel import OverviewPanel
from bagua_autotune.cli.reader import DatabaseReader
from bagua_autotune.views import JobOverview
from tests.autotune.cli.driven_job import JOB, DrivenJob

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


def test_the_graph_takes_the_room_there_is(overviews: dict[str, JobOverview]) -> None:
    for width, blocks in ((30, 21), (60, 40), (100, 40)):
        graph = rows(draw(overviews["midway"], width))["steps"].split()[0]
        assert len(graph) == blocks


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

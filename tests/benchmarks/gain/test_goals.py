"""Goals are met or missed as the figures say, a miss is told with its figure, and the page that the
tables make says what was measured where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from bagua_client import Configuration
from benchmarks.support.cells.cell import Cell
from benchmarks.support.cells.figures import (
    Figures,
    Goal,
    figures_of,
    goals,
    judged,
    with_interval,
)
from benchmarks.support.cells.report import show
from tests.benchmarks.gain.made_up import GOOD, MIB, made_up_cell

pytestmark = pytest.mark.slow

RESNET = Cell("resnet50", "1gbit")
BERT = Cell("bert-base", "300mbit")


def figures(
    step_seconds: Mapping[str, float] = GOOD, cell: Cell = RESNET, **changes: Any
) -> Figures:
    return figures_of(made_up_cell(cell, step_seconds, **changes))


def verdicts(cells: Sequence[Figures]) -> list[str]:
    return [f"{goal.number} {goal.verdict}" for goal in goals(cells)]


def goal(what: str, cells: Sequence[Figures]) -> Goal:
    (found,) = (goal for goal in goals(cells) if what in goal.what)
    return found


def test_a_cell_that_shows_all_meets_every_goal_that_one_cell_can() -> None:
    again = figures(cell=Cell("resnet50", "1gbit", run=2))
    assert verdicts([figures(), again]) == [
        "1 met", "1 met", "2 met", "2 met", "3 met", "4 met", "5 met", "5 met",
    ]  # fmt: skip


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    assert verdicts([]) == [f"{number} not measured" for number in (1, 1, 2, 2, 3, 4, 5, 5)]


def test_cells_that_miss_are_told_by_name_and_figure() -> None:
    slow, slower = figures({**GOOD, "tuned": 1.05}, BERT), figures({**GOOD, "tuned": 1.06})
    found = goal("over the sweep's best", [figures(), slow])
    assert found.verdict == "MISSED"
    assert found.found.startswith("1 of 2 cells; worst bert-base-300mbit-2x2: 1.050 (")
    found = goal("over the sweep's best", [slow, slower])
    assert found.found.startswith("0 of 2 cells; worst resnet50-1gbit-2x2: 1.060")
    assert "missed too by bert-base-300mbit-2x2: 1.050" in found.found


TUNING = "tuning takes"


@pytest.mark.parametrize(
    ("what", "times", "changes", "verdict"),
    [
        ("tuned over stock DDP", {"tuned": 1.42}, {}, "MISSED"),
        ("tuned over stock DDP", {"tuned": 1.405}, {}, "met"),
        # What Bagua published.
        ("Bagua's default more", {"flat 10 MiB": 1.08}, {}, "MISSED"),
        ("a cell under", {}, {"seconds": {"total": 899.0}}, "met"),
        ("a cell under", {}, {"seconds": {"total": 901.0}}, "MISSED"),
        (TUNING, {}, {"tuning_steps": 200, "ended": True}, "met"),
        (TUNING, {}, {"tuning_steps": 201, "ended": True}, "MISSED"),
        (TUNING, {}, {"tuning_steps": 9, "ended": False}, "MISSED"),
        # It broke off.
        (TUNING, {}, {"stored": {"state": "ended", "result": None}}, "MISSED"),
    ],
)
def test_a_goal_is_met_or_missed(
    what: str, times: dict[str, float], changes: dict[str, Any], verdict: str
) -> None:
    cell = made_up_cell(RESNET, {**GOOD, **times})
    if what == TUNING:
        cell["tuning"] |= changes
    else:
        cell |= changes
    assert goal(what, [figures_of(cell)]).verdict == verdict


def test_speed_ups_are_geometric_means_of_exposed_cells_alone() -> None:
    hidden = figures({**GOOD, "compute": 1.35}, BERT)  # the default step is 4 % over computing
    found = goal("stock DDP's default at least", [figures(), hidden])
    assert found.found.startswith("1.386, geometric mean of 1 exposed cells of 2; ")
    none = goal("stock DDP's default at least", [hidden])
    assert none.verdict == "not measured"


def test_what_the_job_itself_has_afterwards_stands_beside_the_run_off() -> None:
    cell = made_up_cell(RESNET, GOOD)
    # But for the steps of the last switch.
    assert figures_of(cell).own_after == pytest.approx(1.0, abs=0.01)
    cell["tuning"]["step_seconds"][-8:] = [1.3 * GOOD["tuned"]] * 8
    assert figures_of(cell).own_after == pytest.approx(1.3, abs=0.01)
    cell["tuning"] |= {"tuning_steps": 139, "ended": False}
    assert figures_of(cell).own_after is None


def test_speed_ups_over_scaled_defaults_and_stock_ddps_best_size_stand_beside() -> None:
    # 20 MB of ResNet-50's 102: 25 MiB are nearest to 5 MiB then, 10 MiB to 2 MiB.
    times = {**GOOD, "stock 5 MiB": 1.2, "stock 1 MiB": 1.1, "stock 10 MiB": 1.3}
    times |= {"stock 50 MiB": 1.5, "tuned": 1.0}
    cell = figures(times)
    assert (cell.over_scaled_stock.over, cell.over_best_stock.over) == (
        "stock 5 MiB",
        "stock 1 MiB",
    )
    assert cell.over_scaled_bagua_default.over == "flat 2 MiB"
    assert "1.200 over the scaled default, 1.100 over stock" in (
        goal("stock DDP's default at least", [cell]).found
    )
    assert "1.300 over the scaled default" in goal("Bagua's default more", [cell]).found
    # The same of VGG16's 553 MB.
    vgg = figures(times, Cell("vgg16", "1gbit"))
    assert vgg.over_scaled_stock.over == "stock 1 MiB"
    assert vgg.over_scaled_bagua_default.over == "flat 512 KiB"
    # A model that computes has its own size.
    assert figures(times, Cell("vgg16", "1gbit", device="cuda")).over_scaled_stock.over == (
        "stock default"
    )


def test_what_the_run_off_lacks_comes_from_the_sweep_and_says_so() -> None:
    lacking = ["stock default", "compute", "flat 10 MiB", "leaders 5 MiB", "tuned"]
    cell = figures(run_off=lacking)
    assert (cell.over_stock.stage, cell.over_scaled_stock.stage) == ("run-off", "sweep")
    assert "range of 3" in with_interval(cell.over_scaled_stock.found)
    assert "range" not in with_interval(cell.over_stock.found)
    assert cell.choice is not None
    assert cell.choice.stage == "sweep"
    complete = figures()
    assert {complete.over_scaled_stock.stage, complete.over_best_stock.stage} == {"run-off"}
    assert complete.choice is not None
    assert complete.choice.stage == "run-off"


def test_goals_are_not_for_smoke_and_loopback_cells() -> None:
    smoke = figures(cell=Cell("resnet50", "1gbit", smoke=True))
    loopback = figures(cell=BERT, fallback="no root")
    kept, left_out = judged([figures(), smoke, loopback])
    assert [cell.cell for cell in kept] == [RESNET]
    assert left_out == ["smoke-resnet50-1gbit-2x2 (smoke)", "bert-base-300mbit-2x2 (loopback)"]
    assert judged([smoke]) == ([smoke], [])


def test_the_way_of_reducing_must_be_the_sweeps() -> None:
    flat = Configuration(5 * MIB)
    what = "hierarchical where it wins"
    wrong = goal(what, [figures(configuration=flat)])
    assert wrong.verdict == "MISSED"
    assert "resnet50-1gbit-2x2: flat, the run-off says hierarchical (0.8" in wrong.found
    loses = {**GOOD, **{f"leaders {size} MiB": 1.3 for size in (1, 2, 5, 10, 25, 50)}}
    loses |= {f"shards {size}": 1.4 for size in ("128 KiB", "512 KiB", "1 MiB", "2 MiB", "5 MiB")}
    loses |= {f"shards {size} MiB": 1.4 for size in (10, 25, 50)}
    loses |= {"leaders 128 KiB": 1.4, "leaders 512 KiB": 1.4, "flat 5 MiB": 1.2}
    assert goal(what, [figures(loses, configuration=flat)]).verdict == "met"
    assert goal(what, [figures(loses)]).verdict == "MISSED"


def test_two_runs_that_differ_by_more_than_their_spread_disagree() -> None:
    apart = figures({**GOOD, "tuned": 1.02}, Cell("resnet50", "1gbit", run=2))
    found = goal("two runs of a cell", [figures(), apart])
    assert found.verdict == "MISSED"
    assert "1010.5 ms (" in found.found
    assert "% wide) do not agree" in found.found
    # Another cell is not another run.
    assert goal("two runs of a cell", [figures(), figures(cell=BERT)]).verdict == "not measured"


LINK = {"bits_per_second": 9.56e8, "round_trip_seconds": 9e-5}


def shown(cell: Cell, **changes: object) -> Figures:
    return figures_of(made_up_cell(cell, {**GOOD, "stock 5 MiB": 1.2}, **changes))


def test_a_page_has_a_part_for_each_network_with_its_link(
    capsys: pytest.CaptureFixture[str],
) -> None:
    conditions = {"link": LINK, "processor": "Abacus", "kernel": "6.1", "commit": "0123456789ab+"}
    cells = [
        shown(Cell("resnet50", "1gbit"), conditions=conditions),
        shown(Cell("vgg16", "unshaped"), conditions=conditions),
        shown(Cell("bert-base", "1gbit"), fallback="no root", conditions={}),
    ]
    show(cells, goals(cells), as_markdown=True)
    page = capsys.readouterr().out
    assert "Measured on Abacus, Linux 6.1, commit 0123456789ab+." in page
    first, second = page.split("### ")[1:3]
    assert first.startswith("1gbit\n")
    assert "956 Mbit/s of TCP, a round trip of 0.09 ms" in first
    assert second.startswith("unshaped\n")
    assert "vgg16-unshaped-2x2" in second
    assert "resnet50" not in second
    assert "Goals and means leave out bert-base-1gbit-2x2 (loopback)." in page
    # Every row of a table is as long as its header.
    for block in page.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1

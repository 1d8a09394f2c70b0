"""The page that the tables make: what it names, and under which conditions cells were measured."""

from __future__ import annotations

import pytest

from benchmarks.support.cells.cell import Cell
from benchmarks.support.cells.figures import Figures, figures_of
from benchmarks.support.cells.goals import goals
from benchmarks.support.cells.report import means, show
from tests.benchmarks.gain.made_up import GOOD, made_up_cell

pytestmark = pytest.mark.slow

LINK = {"bits_per_second": 9.56e8, "round_trip_seconds": 9e-5}


def figures(cell: Cell, **changes: object) -> Figures:
    return figures_of(made_up_cell(cell, {**GOOD, "stock 5 MiB": 1.2}, **changes))


def test_a_page_has_a_part_for_each_network_with_its_link(
    capsys: pytest.CaptureFixture[str],
) -> None:
    conditions = {"link": LINK, "processor": "Abacus", "kernel": "6.1", "commit": "0123456789ab+"}
    cells = [
        figures(Cell("resnet50", "1gbit"), conditions=conditions),
        figures(Cell("vgg16", "unshaped"), conditions=conditions),
        figures(Cell("bert-base", "1gbit"), fallback="no root", conditions={}),
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


def test_means_are_by_network_and_of_all_exposed_cells() -> None:
    hidden = made_up_cell(Cell("vgg16", "unshaped"), {**GOOD, "compute": 1.39})
    cells = [figures(Cell("resnet50", "1gbit")), figures_of(hidden)]
    rows = {row[0]: row[1:] for row in means(cells).rows}
    assert rows["1gbit"] == ["1 of 1", *rows["all"][1:]]
    assert rows["1gbit"][1] == "1.39"
    assert rows["unshaped"] == ["0 of 1", *["-"] * 5]
    assert rows["all"][0] == "1 of 2"
